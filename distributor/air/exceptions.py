"""The errors of ``databricks.air.exceptions``."""

from distributor.serverless_errors import *  # noqa: F403
from distributor.serverless_errors import __all__ as __all__
