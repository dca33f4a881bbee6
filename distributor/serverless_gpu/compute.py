"""GPU types, under the names of ``serverless_gpu.compute``."""

from distributor.core.gpus import GPUType

__all__ = ["GPUType"]
