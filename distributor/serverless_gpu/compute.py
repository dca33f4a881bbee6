"""Types of GPUs, under the names of ``serverless_gpu.compute``."""

from distributor.core.gpus import AcceleratorType, GPUType

__all__ = ["AcceleratorType", "GPUType"]
