"""The decorator, under the names of ``databricks.air.launcher``."""

from distributor.decorated_function import DistributedFunction
from distributor.serverless import distributed

__all__ = ["DistributedFunction", "distributed"]
