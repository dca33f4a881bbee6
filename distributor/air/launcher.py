"""The decorator, under the names of ``databricks.air.launcher``."""

from distributor.serverless import DistributedFunction, distributed

__all__ = ["DistributedFunction", "distributed"]
