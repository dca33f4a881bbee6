"""The names of ``databricks.air``, for code that was written for it."""

from distributor.air import runtime
from distributor.air.launcher import distributed
from distributor.air.ray import ray_init, ray_launch
from distributor.unsupported import refuse_modules

__all__ = ["distributed", "ray_init", "ray_launch", "runtime"]

refuse_modules()
