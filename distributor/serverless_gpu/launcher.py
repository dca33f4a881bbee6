"""The decorator, as ``serverless_gpu.launcher`` names it."""

from distributor.serverless import distributed

__all__ = ["distributed"]
