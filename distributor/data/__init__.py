"""Spark DataFrames and Parquet files as training data: each rank reads its share."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distributor.core.versions import require_arrow

if TYPE_CHECKING:
    from distributor.data.dataframes import SparkDataset, from_spark
    from distributor.data.parquet import from_parquet
    from distributor.data.prediction import predict, predict_batch_udf
    from distributor.data.shard import DatasetShard

__all__ = [
    "DatasetShard",
    "SparkDataset",
    "from_parquet",
    "from_spark",
    "predict",
    "predict_batch_udf",
]

# The module of each public name. It is imported on first use, because it may need torch.
_MODULES = {
    "DatasetShard": "distributor.data.shard",
    "SparkDataset": "distributor.data.dataframes",
    "from_parquet": "distributor.data.parquet",
    "from_spark": "distributor.data.dataframes",
    "predict": "distributor.data.prediction",
    "predict_batch_udf": "distributor.data.prediction",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_arrow(f"distributor.data.{name}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
