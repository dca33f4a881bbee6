"""The decorator, under the names of ``serverless_gpu.launcher``."""

from distributor.air.launcher import *  # noqa: F403
from distributor.air.launcher import __all__ as __all__
