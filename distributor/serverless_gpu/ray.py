"""The Ray decorator, under the names of ``serverless_gpu.ray``."""

from distributor.ray import RayFunction, ray_launch

__all__ = ["RayFunction", "ray_launch"]
