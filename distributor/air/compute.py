"""Types of GPUs, under the names of ``databricks.air.compute``."""

from distributor.core.gpus import AcceleratorType, GPUType

__all__ = ["AcceleratorType", "GPUType"]
