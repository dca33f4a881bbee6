"""The files of a folder as training data, under the names of ``serverless_gpu.data``."""

from distributor.air.data import *  # noqa: F403
from distributor.air.data import __all__ as __all__
