"""The rows of the run's datasets that Spark passes to a node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from distributor.core.resources import local_folder
from distributor.launchers.spark.task.task_spec import TaskSpec


@contextlib.contextmanager
def dataset_file(spec: TaskSpec, batches: Iterator[Any]) -> Iterator[BinaryIO | None]:
    """Write the rows into a file on one of Spark's local disks, for the node's ranks to map."""
    if not spec.datasets:
        for _ in batches:
            pass
        yield None
        return
    from distributor.data.chunk_file import write_chunks

    with write_chunks(batches, spec.datasets, spec.share.ranks_per_node, local_folder()) as file:
        yield file
