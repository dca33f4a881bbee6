"""The DataFrames among the arguments of a run, before it starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distributor.core.extras import require_spark
from distributor.data.dataframes import SparkDataset
from distributor.serialization.program import Module
from distributor.spark.session import Session

if TYPE_CHECKING:
    from distributor.launchers.spark.datasets.collection import Datasets


def check_datasets(found: list[SparkDataset], train_object: Any, args: tuple[Any, ...]) -> None:
    """Check DataFrames before anything is launched."""
    if isinstance(train_object, (str, os.PathLike, Module)) and len(args) and found:
        raise TypeError(
            f"The arguments of a script are strings, but {found[0].name} is a DataFrame. Pass a "
            "function, or the path of files that Spark has written."
        )
    if found:
        require_spark()
    session = Session.active()
    for dataset in found:
        if session is None or not session.owns(dataset.frame):
            raise ValueError(
                f"The DataFrame {dataset.name} belongs to another Spark session than the active "
                "one, on which the ranks run: pass a DataFrame of the active session."
            )


def datasets_of(
    found: list[SparkDataset], positions: Callable[[], Mapping[str, Any]]
) -> Datasets | None:
    """Return the datasets of a run, if it has any."""
    if not found:
        return None
    from distributor.launchers.spark.datasets.collection import Datasets  # which needs pyarrow

    return Datasets(found, positions)
