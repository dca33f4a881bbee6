"""The names of the ``serverless_gpu`` package, for code that was written for it."""

from typing import TYPE_CHECKING

from distributor.serverless import distributed
from distributor.serverless_gpu import compute, launcher, ray, runtime
from distributor.serverless_gpu.unsupported import RAY_METRICS, refusing
from distributor.unsupported import refuse_modules

__all__ = ["compute", "distributed", "launcher", "ray", "runtime"]

refuse_modules()

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = refusing(__name__, RAY_METRICS)
