"""The names of the ``serverless_gpu`` package, for code that was written for it."""

from distributor.serverless import distributed
from distributor.serverless_gpu import compute, launcher, ray, runtime
from distributor.unsupported import refuse_modules

__all__ = ["compute", "distributed", "launcher", "ray", "runtime"]

refuse_modules()
