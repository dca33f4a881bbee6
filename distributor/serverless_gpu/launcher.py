"""The decorator, under the names of ``serverless_gpu.launcher``."""

from distributor.serverless import distributed

__all__ = ["distributed"]
