"""Types of GPUs, under the names of ``serverless_gpu.compute``."""

from distributor.air.compute import *  # noqa: F403
from distributor.air.compute import __all__ as __all__
