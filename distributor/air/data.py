"""The names of ``databricks.air.data``, which are not supported: each says what to use instead."""

from typing import TYPE_CHECKING

from distributor.serverless_gpu.unsupported import VOLUMES, refusing

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = refusing(__name__, VOLUMES)
