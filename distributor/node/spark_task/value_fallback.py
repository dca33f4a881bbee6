"""Saves a value that cannot reach the driver, because the work that made it is done."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributor.core.host import host_name
from distributor.core.resources import format_bytes
from distributor.core.text import listed
from distributor.errors import ValueTooLarge
from distributor.node.spark_task.task_spec import TaskSpec
from distributor.serialization.outcome import Value

WORTH_KEEPING = 64 * 1024 * 1024
"""Bytes from which a value on its way through Spark is kept in ``log_dir``, should it be lost."""


def keep_large(values: Sequence[Value], spec: TaskSpec) -> None:
    """Keep values that Spark may not be able to carry.

    Raises
    ------
    ValueTooLarge
        Where it surely is not; says where they are kept.
    """
    size = sum(value.size for value in values)
    if size > spec.most_through_spark:
        raise ValueTooLarge(
            f"{_sizes(values)}. It did not reach the driver at {spec.hub[0]}:{spec.hub[1]}, and "
            f"Spark has room for {format_bytes(spec.most_through_spark)} of it "
            "(spark.driver.maxResultSize, and a quarter of spark.driver.memory and "
            f"spark.executor.memory). {_keep_all(values, spec)} Open the way to the driver "
            "(hub_address), or give Spark more."
        )
    if spec.log_dir is not None:
        for value in values:
            if value.size > WORTH_KEEPING:
                _keep(value, spec)


def keep_refused(values: Sequence[Value], room: Mapping[int, int], spec: TaskSpec) -> None:
    """Keep values for which the driver has no memory.

    Parameters
    ----------
    values : sequence of Value
        All of the node's.
    room : mapping of int to int
        How much memory the driver has (bytes), by rank whose value takes more.

    Raises
    ------
    ValueTooLarge
        Where there are any; says where they are kept.
    """
    refused = [value for value in values if value.rank in room]
    if refused:
        raise ValueTooLarge(
            f"{_sizes(refused)}, and the driver has {format_bytes(min(room.values()))} of memory "
            f"left. {_keep_all(refused, spec)} Give the driver more memory, or write what is large "
            "to storage and return where it is."
        )


def _sizes(values: Sequence[Value]) -> str:
    ranks = listed("rank", [value.rank for value in values])
    return f"What {ranks} returned takes {format_bytes(sum(value.size for value in values))}"


def _keep_all(values: Sequence[Value], spec: TaskSpec) -> str:
    return " ".join(_keep(value, spec) for value in values)


def _keep(value: Value, spec: TaskSpec) -> str:
    folder = Path(spec.log_dir) / spec.run_id if spec.log_dir else Path(tempfile.gettempdir())
    path = folder / f"{spec.run_id}-value-of-rank-{value.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            value.file.seek(0)
            shutil.copyfileobj(value.file, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"It could not be kept in {path} on {host_name()}: {error}."
    return f"It is kept on {host_name()}: distributor.load_value('{path}') loads it."
