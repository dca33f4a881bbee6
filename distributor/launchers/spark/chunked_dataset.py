"""A DataFrame as chunks that Spark keeps on its disks, and what is known of each."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from distributor._compat import pyspark as spark_texts
from distributor.control.graceful_shutdown import Cancellation
from distributor.data.chunk_file import CHUNK_COLUMNS, INDEX_COLUMNS, DatasetSpec
from distributor.data.dataframes import SparkDataset, numbered, vectors_of
from distributor.errors import DistributorError
from distributor.spark.package_shipping import portable_task
from distributor.spark.session import Session
from distributor.spark.spark_job import CallSite, SparkJob


@dataclass(frozen=True)
class DataJobs:
    """Runs the Spark jobs of one run that prepare its datasets.

    Parameters
    ----------
    session : Session
        The session of the DataFrames.
    run_id : str
        The run's id.
    call_site : CallSite
        The user's line that started the run.
    pool : str or None
        The fair scheduler's pool.
    cancellation : Cancellation
        Requests to end the run.
    """

    session: Session
    run_id: str
    call_site: CallSite
    pool: str | None
    cancellation: Cancellation

    def run(
        self,
        frame: Any,
        description: str,
        action: Callable[[Any], Any] = lambda frame: frame.collect(),
    ) -> Any:
        """Run a job, and return what `action` returns for the DataFrame; by default its rows."""
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with SparkJob(
            self.session,
            frame,
            f"{self.run_id}-data",
            ended.put,
            description=description,
            call_site=self.call_site,
            pool=self.pool,
            action=action,
        ) as job:
            self.cancellation.set_action(job.cancel)
            try:
                ending = ended.get()
            except BaseException:
                job.cancel()
                raise
            finally:
                self.cancellation.set_action(lambda: None)
        self.cancellation.check()
        if isinstance(ending, BaseException):
            found = re.search(spark_texts.FULL_DISK, str(ending))
            if found and not isinstance(ending, OSError):
                raise DistributorError(
                    f"{description}: a disk is full, to which Spark writes the rows (below "
                    f"spark.local.dir).\n{found.group(1)}"
                ) from ending
            raise ending
        return ending


CHUNK_BYTES = 1024 * 1024
ARROW_BATCH_BYTES = 128 * 1024 * 1024
"""Bytes of a batch of chunks that Spark may send to a Python worker."""
NOT_IN_ARROW = re.compile(r"\binterval\b(?! (day|hour|minute|second))")
"""In the name of a type: intervals of months, and those of the past, of months, days and time."""


@dataclass(frozen=True)
class ChunkedDataset:
    """A DataFrame's rows as chunks.

    Parameters
    ----------
    frame : DataFrame
        A row for each chunk, with `CHUNK_COLUMNS`, which Spark keeps on its disks.
    places : sequence of (int, int)
        The part and the number in it of each chunk, in the order of the DataFrame's rows.
    spec : DatasetSpec
        What the ranks know of it.
    """

    frame: Any
    places: Sequence[tuple[int, int]]
    spec: DatasetSpec


@contextlib.contextmanager
def chunked(datasets: Sequence[SparkDataset], jobs: DataJobs) -> Iterator[list[ChunkedDataset]]:
    """Compute DataFrames once; Spark keeps their rows for the duration of the context."""
    with contextlib.ExitStack() as stack:
        frames = [stack.enter_context(_persisted_chunks(each, jobs.session)) for each in datasets]
        indexes = _indexes(frames, jobs, ", ".join(dataset.name for dataset in datasets))
        yield [
            ChunkedDataset(frame, [(row.part, row.number) for row in rows], _spec_of(dataset, rows))
            for frame, dataset, rows in zip(frames, datasets, indexes, strict=True)
        ]


@contextlib.contextmanager
def _persisted_chunks(dataset: SparkDataset, session: Session) -> Iterator[Any]:
    """Yield a DataFrame of chunks, which Spark keeps on its disks once it has computed them."""
    from pyspark import StorageLevel

    _check_columns(dataset)
    # Spark keeps equal plans once: a run that ends would free the rows of another one.
    argument = json.dumps([_chunk_bytes(session), uuid.uuid4().hex]).encode()
    task = portable_task(session, "distributor.data.chunk_file:pack", argument)
    frame = session.map_in_arrow(numbered(dataset.frame), task, CHUNK_COLUMNS)
    frame.persist(StorageLevel.DISK_ONLY)
    try:
        yield frame
    finally:
        with contextlib.suppress(Exception):  # the session may have ended
            frame.unpersist()


def _check_columns(dataset: SparkDataset) -> None:
    """Check that a DataFrame has columns, and that batches can have them."""
    columns = dataset.frame.columns
    if not columns:
        raise ValueError(f"The DataFrame {dataset.name} has no columns.")
    if repeated := sorted({name for name in columns if columns.count(name) > 1}):
        raise ValueError(
            f"The DataFrame {dataset.name} has several columns of the name {repeated[0]!r}, by "
            "which batches have them: drop or rename all but one, such as with toDF(...)."
        )
    for field in dataset.frame.schema.fields:
        if NOT_IN_ARROW.search(kind := field.dataType.simpleString()):
            raise TypeError(
                f"Column {field.name!r} of the DataFrame {dataset.name} has the type {kind}, which "
                "Spark cannot pass to Python as Arrow data. Leave it out, as with df.drop, or cast "
                "it to another type."
            )


def _indexes(frames: Sequence[Any], jobs: DataJobs, names: str) -> list[list[Any]]:
    """Compute all chunks in one job, and return what describes those of each DataFrame."""
    from pyspark.sql import functions

    columns = [column.split()[0] for column in INDEX_COLUMNS.split(", ")]
    selected = [
        frame.select(functions.lit(number).alias("dataset"), *columns)
        for number, frame in enumerate(frames)
    ]
    union = functools.reduce(lambda one, other: one.union(other), selected)
    indexes: list[list[Any]] = [[] for _ in frames]
    for row in jobs.run(union, f"Rows of {names}"):
        indexes[row.dataset].append(row)
    for rows in indexes:
        rows.sort(key=lambda row: (row.part, row.number))
    return indexes


def _chunk_bytes(session: Session) -> int:
    """Return the size of chunks with which batches of chunks stay small.

    Spark 3.5 limits only the number of rows of a batch, later versions also its size.
    """
    if session.has_conf("spark.sql.execution.arrow.maxBytesPerBatch"):
        return CHUNK_BYTES
    max_rows = int(session.conf("spark.sql.execution.arrow.maxRecordsPerBatch") or 10_000)
    return CHUNK_BYTES if max_rows <= 0 else min(CHUNK_BYTES, max(1, ARROW_BATCH_BYTES // max_rows))


def _spec_of(dataset: SparkDataset, rows: list[Any]) -> DatasetSpec:
    if not rows:
        raise ValueError(f"The DataFrame {dataset.name} has no rows.")
    names = dataset.frame.columns
    schema = pa.ipc.read_schema(pa.py_buffer(next(row.schema for row in rows if row.schema)))
    named = pa.schema([field.with_name(name) for field, name in zip(schema, names, strict=True)])
    nulls = zip(*(json.loads(row.nulls) for row in rows), strict=True)
    return DatasetSpec(
        name=dataset.name,
        schema=named.serialize().to_pybytes(),
        vectors=vectors_of(dataset.frame),
        chunk_rows=np.array([row.num_rows for row in rows], dtype=np.int64),
        chunk_bytes=np.array([row.num_bytes for row in rows], dtype=np.int64),
        checksums=np.array([row.checksum for row in rows], dtype=np.int64),
        null_counts=dict(zip(names, map(sum, nulls), strict=True)),
        equal=dataset.equal,
        split=dataset.split,
    )
