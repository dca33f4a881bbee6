"""The decorator, under the names of ``serverless_gpu.launcher``."""

from distributor.serverless import DistributedFunction, distributed

__all__ = ["DistributedFunction", "distributed"]
