"""Who a rank is, under the names of ``serverless_gpu.runtime``."""

from distributor.air.runtime import *  # noqa: F403
from distributor.air.runtime import __all__ as __all__
