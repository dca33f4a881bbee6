"""Saves values that cannot reach the driver, so that the work that made them is not lost."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributor.core.addresses import host_name
from distributor.core.files import atomic_path, for_this_user
from distributor.core.resources import format_bytes
from distributor.core.text import listed
from distributor.errors import ValueTooLarge
from distributor.launchers.spark.task.task_spec import TaskSpec
from distributor.serialization.outcome import Value

LARGE_VALUE_BYTES = 64 * 1024 * 1024
"""Size above which a value that goes through Spark is also saved in ``log_dir``."""


def save_large_values(values: Sequence[Value], spec: TaskSpec) -> None:
    """Save values that Spark may be unable to carry."""
    size = sum(value.size for value in values)
    if size > spec.max_spark_result_bytes:
        raise ValueTooLarge(
            f"{_describe_sizes(values)}. It did not reach the driver at {spec.hub[0]}:"
            f"{spec.hub[1]}, and Spark has room for {format_bytes(spec.max_spark_result_bytes)} "
            "of it (spark.driver.maxResultSize, and a quarter of spark.driver.memory and "
            f"spark.executor.memory). {_save_all(values, spec)} Make the driver reachable from the "
            "executors (hub_address), or raise these limits."
        )
    if spec.log_dir is not None:
        for value in values:
            if value.size > LARGE_VALUE_BYTES:
                _save(value, spec)


def save_refused_values(
    values: Sequence[Value], free_memory: Mapping[int, int], spec: TaskSpec
) -> None:
    """Save values for which the driver has too little memory."""
    refused = [value for value in values if value.rank in free_memory]
    if refused:
        raise ValueTooLarge(
            f"{_describe_sizes(refused)}, and the driver has "
            f"{format_bytes(min(free_memory.values()))} of memory left. {_save_all(refused, spec)} "
            "Run the driver with more memory, or write large results to storage and return their "
            "path."
        )


def save_undelivered_values(values: Sequence[Value], spec: TaskSpec) -> None:
    """Save values of a node that has nothing but its link to send them by."""
    if values:
        raise ValueTooLarge(
            f"{_describe_sizes(values)}. It did not reach the driver at {spec.hub[0]}:"
            f"{spec.hub[1]} by this node's connection. {_save_all(values, spec)}"
        )


def _describe_sizes(values: Sequence[Value]) -> str:
    ranks = listed("rank", [value.rank for value in values])
    return f"What {ranks} returned takes {format_bytes(sum(value.size for value in values))}"


def _save_all(values: Sequence[Value], spec: TaskSpec) -> str:
    return " ".join(_save(value, spec) for value in values)


def _save(value: Value, spec: TaskSpec) -> str:
    """Save a value for this user alone; return a sentence for the user that says where it is."""
    folder = Path(spec.log_dir) / spec.share.run_id if spec.log_dir else Path(tempfile.gettempdir())
    path = folder / f"{spec.share.run_id}-value-of-rank-{value.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial, open(partial, "xb", opener=for_this_user) as file:
            value.file.seek(0)
            shutil.copyfileobj(value.file, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"It could not be saved in {path} on {host_name()}: {error}."
    return f"It is saved on {host_name()}: distributor.load_value('{path}') loads it."
