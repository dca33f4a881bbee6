"""The datasets of a run: computed once, and distributed to the ranks of each attempt.

Spark keeps the rows of each DataFrame on its disks, as chunks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from distributor._compat import pyspark as private
from distributor.control.waiting import Cancellation
from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.data.chunk_file import (
    CHUNK_COLUMNS,
    INDEX_COLUMNS,
    ChunkFileWriter,
    DatasetSpec,
)
from distributor.data.dataframes import SparkDataset, numbered, vectors_of
from distributor.data.epochs import Epoch, Layout, Order
from distributor.errors import DistributorError
from distributor.screen.messages import notify, warn
from distributor.spark.application import no_progress_bar
from distributor.spark.session import Session
from distributor.spark.shipping import portable_task
from distributor.spark.spark_job import CallSite, SparkJob

CHUNK_BYTES = 1024 * 1024
ARROW_BATCH_BYTES = 128 * 1024 * 1024
"""Bytes of a batch of chunks that Spark may send to a Python worker."""
NOT_IN_ARROW = re.compile(r"\binterval\b(?! (day|hour|minute|second))")
"""In the name of a type: intervals of months, and those of the past, of months, days and time."""
NODE_COLUMNS = ("node", "dataset", "chunk", "message")
"""The columns of the DataFrame that has each node's chunks, as the tasks of the nodes read them."""


@dataclass(frozen=True)
class ChunkedDataset:
    """A DataFrame's rows as chunks."""

    frame: Any  # a row for each chunk, with `CHUNK_COLUMNS`, which Spark keeps on its disks
    places: Sequence[tuple[int, int]]  # of each chunk: the part, and the number in it
    spec: DatasetSpec


def chunks_of_nodes(
    spec: DatasetSpec, num_nodes: int, ranks_per_node: int, epoch: Epoch | None
) -> list[list[int]]:
    """Return the chunks that each node needs of a dataset."""
    num_ranks = num_nodes * ranks_per_node
    epochs = [Epoch(0, Order()), *([epoch] if epoch else [])]
    return [
        sorted(
            {
                int(chunk)
                for share in range(node * ranks_per_node, (node + 1) * ranks_per_node)
                for each in epochs
                for span in spec.layout.plan(each, share, num_ranks)
                for chunk in np.unique(span.pieces[:, 0])
            }
        )
        for node in range(num_nodes)
    ]


def _union(frames: Sequence[Any]) -> Any:
    return functools.reduce(lambda one, other: one.unionByName(other), frames)


_keys: dict[int, list[int]] = {}
"""What Spark returned earlier, by the number of partitions: its hash function never changes."""


def _partition_keys(spark: Any, count: int) -> list[int]:
    """Return a key for each partition, such that Spark's hash of the key is that partition."""
    if count not in _keys:
        found: dict[int, int] = {}
        size = 16 * count
        while len(found) < count:
            hashed = spark.range(size).selectExpr("id", f"pmod(hash(id), {count}) AS part")
            for row in hashed.collect():
                found.setdefault(row.part, row.id)
            size *= 2
        _keys[count] = [found[part] for part in range(count)]
    return _keys[count]


class Datasets:
    """The datasets of a run.

    Parameters
    ----------
    given : sequence of SparkDataset
        The DataFrames, at least one.
    positions : callable, optional
        Returns the positions of data loaders from which the ranks of the next attempt resume.
    """

    def __init__(
        self,
        given: Sequence[SparkDataset],
        positions: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.given = given
        self._positions = positions
        self._datasets: list[ChunkedDataset] = []
        self._session = Session(given[0].frame.sparkSession)
        self._shown_for = 0
        self._file: BinaryIO | None = None
        self._frame: tuple[object, Any] | None = None
        self._kept_rows = contextlib.ExitStack()  # of `_frame`
        self.lock = threading.Lock()

    @property
    def key(self) -> Hashable:
        """What is equal for datasets of the same DataFrames, shared by ranks in the same way."""
        return tuple((id(each.frame), each.equal, each.split, each.name) for each in self.given)

    @property
    def specs(self) -> tuple[DatasetSpec, ...]:
        """What the ranks know of the datasets."""
        return tuple(dataset.spec for dataset in self._datasets)

    @contextlib.contextmanager
    def opened(
        self, run_id: str, call_site: CallSite, pool: str | None, cancellation: Cancellation
    ) -> Iterator[None]:
        """Compute the DataFrames. Spark keeps their rows for the duration of the context."""
        self._prepare_jobs(run_id, call_site, pool, cancellation)
        with no_progress_bar(self._session), contextlib.ExitStack() as kept, self._kept_rows:
            frames = [
                kept.enter_context(_kept(_chunks(each, self._session))) for each in self.given
            ]
            self._datasets = [
                ChunkedDataset(
                    frame, [(row.part, row.number) for row in rows], _spec_of(dataset, rows)
                )
                for frame, dataset, rows in zip(
                    frames, self.given, self._indexes(frames), strict=True
                )
            ]
            try:
                yield
            finally:
                if self._file is not None:
                    self._file.close()

    def _prepare_jobs(
        self, run_id: str, call_site: CallSite, pool: str | None, cancellation: Cancellation
    ) -> None:
        self._job = functools.partial(
            SparkJob, self._session, tag=f"{run_id}-data", call_site=call_site, pool=pool
        )
        self._cancellation = cancellation

    def _indexes(self, frames: Sequence[Any]) -> list[list[Any]]:
        """Compute all chunks in one job, and return what describes those of each DataFrame."""
        from pyspark.sql import functions

        columns = [column.split()[0] for column in INDEX_COLUMNS.split(", ")]
        selected = [
            frame.select(functions.lit(number).alias("dataset"), *columns)
            for number, frame in enumerate(frames)
        ]
        names = ", ".join(dataset.name for dataset in self.given)
        indexes: list[list[Any]] = [[] for _ in frames]
        for row in self._run(_union(selected), f"Rows of {names}"):
            indexes[row.dataset].append(row)
        for rows in indexes:
            rows.sort(key=lambda row: (row.part, row.number))
        return indexes

    def _run(
        self,
        frame: Any,
        description: str,
        action: Callable[[Any], Any] = lambda frame: frame.collect(),
    ) -> Any:
        """Run a job, and return what `action` returns for the DataFrame; by default its rows."""
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._job(frame, on_end=ended.put, description=description, action=action) as job:
            self._cancellation.set_action(job.cancel)
            try:
                ending = ended.get()
            except BaseException:
                job.cancel()
                raise
            finally:
                self._cancellation.set_action(lambda: None)
        self._cancellation.check()
        if not isinstance(ending, BaseException):
            return ending
        found = re.search(private.FULL_DISK, str(ending))
        if found and not isinstance(ending, OSError):
            raise DistributorError(
                f"{description}: a disk is full, to which Spark writes the rows (below "
                f"spark.local.dir).\n{found.group(1)}"
            ) from ending
        raise ending

    def check(self, num_ranks: int) -> None:
        """Check that there are rows for so many ranks, and show what each gets."""
        for spec in self.specs:
            if spec.layout.split and spec.layout.num_rows < num_ranks:
                raise ValueError(
                    f"The DataFrame {spec.name} has {counted(spec.layout.num_rows, 'row')}, which "
                    f"are too few for {num_ranks} ranks."
                )
        if self._shown_for != num_ranks:
            for spec in self.specs:
                notify(_describe(spec, num_ranks))
        self._shown_for = num_ranks

    def hint(self, error: Exception) -> str | None:
        """Return which columns there are, if a rank has looked for one that is not there."""
        name = error.args[0] if isinstance(error, KeyError) and error.args else None
        columns = {each.name: each.schema.names for each in self.specs}
        if not isinstance(name, str) or any(name in names for names in columns.values()):
            return None
        have = (f"{data} has the columns {', '.join(names)}" for data, names in columns.items())
        return f"If '{name}' is meant as a column: {'; '.join(have)}."

    def frame(self, num_nodes: int, ranks_per_node: int) -> Any:
        """Return a DataFrame with a partition for each node, which Spark has on its disks."""
        return self._frame_for(num_nodes, ranks_per_node, self._resumed_epochs())

    def _frame_for(self, num_nodes: int, ranks_per_node: int, epochs: Mapping[str, Epoch]) -> Any:
        key = num_nodes, ranks_per_node, epochs
        if self._frame and self._frame[0] == key:
            return self._frame[1]
        self._frame = None
        self._kept_rows.close()
        rows = self._distributed(num_nodes, ranks_per_node, epochs)
        frame = self._kept_rows.enter_context(_kept(rows))
        self._frame = key, frame
        # Not a count, which would be another stage.
        self._run(frame.select("node"), "Rows for the ranks")
        return frame

    def _distributed(self, num_nodes: int, ranks_per_node: int, epochs: Mapping[str, Epoch]) -> Any:
        """Return a DataFrame with a partition for each node, which contains the node's chunks."""
        from pyspark.sql import functions

        keys = _partition_keys(self._session.spark, num_nodes)
        frames = []
        for number, dataset in enumerate(self._datasets):
            nodes = chunks_of_nodes(
                dataset.spec, num_nodes, ranks_per_node, epochs.get(dataset.spec.name)
            )
            targets = self._session.data_frame(
                [
                    (*dataset.places[chunk], keys[node], node, number, chunk)
                    for node, chunks in enumerate(nodes)
                    for chunk in chunks
                ],
                "part int, number int, key long, node int, dataset int, chunk int",
            )
            frames.append(dataset.frame.join(functions.broadcast(targets), ["part", "number"]))
        return _union(frames).repartition(num_nodes, "key").select(*NODE_COLUMNS)

    def _resumed_epochs(self) -> dict[str, Epoch]:
        """Return the epochs from which ranks resume, by dataset."""
        sizes = {spec.name: spec.layout.num_rows for spec in self.specs}
        try:
            positions = self._positions()
        except Exception as error:
            warn(
                f"The latest checkpoint cannot be read here ({error!r}). If the ranks resume from "
                "it, there must be as many as when it was reported."
            )
            return {}
        return {
            position["name"]: Epoch.from_position(position)
            for position in positions.values()
            if "name" in position and sizes.get(position["name"]) == position["rows"]
        }

    def file(self) -> BinaryIO:
        """Return a file with all chunks, for ranks on this machine."""
        if self._file is None:
            folder = tempfile.gettempdir()
            if not self._session.is_connect:
                folder = os.path.abspath(private.temporary_folder(self._session.spark.sparkContext))
            file = tempfile.TemporaryFile(dir=folder)
            try:
                self._write(file)
            except BaseException as error:
                with contextlib.suppress(OSError):  # of what it has not yet written
                    file.close()
                if not isinstance(error, OSError):
                    raise
                raise DistributorError(
                    f"The rows of the DataFrames cannot be written to {folder} ({error}). "
                    "Free space there, or set spark.local.dir to a larger disk."
                ) from error
            self._file = file
        return self._file

    def _write(self, file: BinaryIO) -> None:
        writer = ChunkFileWriter(file, self.specs)
        for number, dataset in enumerate(self._datasets):
            chunks = {place: chunk for chunk, place in enumerate(dataset.places)}

            def write(frame: Any, number: int = number, chunks: Any = chunks) -> None:
                for row in frame.toLocalIterator(prefetchPartitions=True):
                    writer.add(number, chunks[row.part, row.number], row.message)

            frame = dataset.frame.select("part", "number", "message")
            self._run(frame, f"Rows of {dataset.spec.name} for ranks here", write)
        writer.finish(0)


class SharedDatasets(Datasets):
    """The datasets of one of several runs, for which others of the same key have been opened.

    Parameters
    ----------
    opened : Datasets
        The others. Rows are computed once, and distributed once to so many nodes.
    of_run : Datasets
        The datasets that the run would have alone.
    """

    def __init__(self, opened: Datasets, of_run: Datasets) -> None:
        super().__init__(of_run.given, of_run._positions)
        self._datasets, self._opened = opened._datasets, opened

    @contextlib.contextmanager
    def opened(
        self, run_id: str, call_site: CallSite, pool: str | None, cancellation: Cancellation
    ) -> Iterator[None]:
        self._prepare_jobs(run_id, call_site, pool, cancellation)
        with self._kept_rows:
            yield

    def _frame_for(self, num_nodes: int, ranks_per_node: int, epochs: Mapping[str, Epoch]) -> Any:
        if epochs:  # of this run alone
            return super()._frame_for(num_nodes, ranks_per_node, epochs)
        with self._opened.lock:
            return self._opened._frame_for(num_nodes, ranks_per_node, epochs)

    def file(self) -> BinaryIO:
        with self._opened.lock:
            return self._opened.file()


@contextlib.contextmanager
def _kept(frame: Any) -> Iterator[Any]:
    """Have Spark keep a DataFrame's rows on its disks once it has computed them."""
    from pyspark import StorageLevel

    frame.persist(StorageLevel.DISK_ONLY)
    try:
        yield frame
    finally:
        with contextlib.suppress(Exception):  # the session may have ended
            frame.unpersist()


def _chunks(dataset: SparkDataset, session: Session) -> Any:
    """Return a DataFrame of chunks."""
    _check_columns(dataset)
    # Spark keeps equal plans once: a run that ends would free the rows of another one.
    argument = json.dumps([_chunk_bytes(session), uuid.uuid4().hex]).encode()
    task = portable_task(session, "distributor.data.chunk_file:pack", argument)
    return session.map_in_arrow(numbered(dataset.frame), task, CHUNK_COLUMNS)


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
        schema=named,
        vectors=vectors_of(dataset.frame),
        layout=Layout(
            np.array([row.num_rows for row in rows], dtype=np.int64),
            np.array([row.num_bytes for row in rows], dtype=np.int64),
            dataset.equal,
            dataset.split,
        ),
        checksums=np.array([row.checksum for row in rows], dtype=np.int64),
        null_counts=dict(zip(names, map(sum, nulls), strict=True)),
    )


def _describe(spec: DatasetSpec, num_ranks: int) -> str:
    layout = spec.layout
    size = format_bytes(float(layout.chunk_bytes.sum()))
    rows = f"{spec.name}: {counted(layout.num_rows, 'row')} ({size})"
    if not layout.split:
        return f"{rows}, all for each of {counted(num_ranks, 'rank')}"
    per_rank = layout.rows_per_rank(num_ranks)
    difference = sum(per_rank) - layout.num_rows
    change = "dropped" if difference < 0 else "repeated"
    note = f"; {counted(abs(difference), 'row')} {change}" if difference else ""
    least, most = min(per_rank), max(per_rank)
    share = f"{most}" if least == most else f"{least} or {most}"
    return f"{rows}, {share} for each of {counted(num_ranks, 'rank')}{note}"
