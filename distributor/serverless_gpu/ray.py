"""The Ray decorator, under the names of ``serverless_gpu.ray``."""

from typing import TYPE_CHECKING

from distributor.ray import RayFunction, ray_launch
from distributor.serverless_gpu.unsupported import RAY_METRICS, refusing

__all__ = ["RayFunction", "ray_launch"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = refusing(__name__, RAY_METRICS)
