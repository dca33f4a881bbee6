"""The datasets of a run: computed once, and distributed to the ranks of each attempt."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from distributor._compat import pyspark as private
from distributor.control.graceful_shutdown import Cancellation
from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.data.chunk_file import ChunkFileWriter, DatasetSpec
from distributor.data.dataframes import SparkDataset
from distributor.data.epochs import Epoch, Order
from distributor.errors import DistributorError
from distributor.launchers.spark.chunked_dataset import ChunkedDataset, DataJobs, chunked
from distributor.screen.messages import notify, warn
from distributor.spark.log_quieting import no_progress_bar
from distributor.spark.session import Session
from distributor.spark.spark_job import CallSite

NODE_COLUMNS = ("node", "dataset", "chunk", "message")
"""The columns of `distributed`, as the tasks of the nodes read them."""


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


def distributed(
    datasets: Sequence[ChunkedDataset],
    num_nodes: int,
    ranks_per_node: int,
    epochs: Mapping[str, Epoch],
) -> Any:
    """Return a DataFrame with a partition for each node, which contains the node's chunks."""
    from pyspark.sql import functions

    session = Session(datasets[0].frame.sparkSession)
    keys = _partition_keys(session.spark, num_nodes)
    frames = []
    for number, dataset in enumerate(datasets):
        nodes = chunks_of_nodes(
            dataset.spec, num_nodes, ranks_per_node, epochs.get(dataset.spec.name)
        )
        targets = session.data_frame(
            list(_targets(nodes, number, dataset.places, keys)),
            "part int, number int, key long, node int, dataset int, chunk int",
        )
        frames.append(dataset.frame.join(functions.broadcast(targets), ["part", "number"]))
    frame = functools.reduce(lambda one, other: one.unionByName(other), frames)
    return frame.repartition(num_nodes, "key").select(*NODE_COLUMNS)


def _targets(
    nodes: list[list[int]], dataset: int, places: Sequence[tuple[int, int]], keys: list[int]
) -> Iterator[tuple[int, ...]]:
    for node, chunks in enumerate(nodes):
        for chunk in chunks:
            yield (*places[chunk], keys[node], node, dataset, chunk)


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
        self._given = given
        self._positions = positions
        self._datasets: list[ChunkedDataset] = []
        self._jobs: DataJobs
        self._shown_for = 0
        self._file: BinaryIO | None = None
        self._frame: tuple[object, Any] | None = None

    @property
    def specs(self) -> tuple[DatasetSpec, ...]:
        """What the ranks know of the datasets."""
        return tuple(dataset.spec for dataset in self._datasets)

    @contextlib.contextmanager
    def opened(
        self, run_id: str, call_site: CallSite, pool: str | None, cancellation: Cancellation
    ) -> Iterator[None]:
        """Compute the DataFrames. Spark keeps their rows for the duration of the context."""
        session = Session(self._given[0].frame.sparkSession)
        self._jobs = DataJobs(session, run_id, call_site, pool, cancellation)
        with no_progress_bar(session), chunked(self._given, self._jobs) as self._datasets:
            try:
                yield
            finally:
                self._close()

    def check(self, num_ranks: int) -> None:
        """Check that there are rows for so many ranks, and show what each gets."""
        for spec in self.specs:
            if spec.split and spec.layout.num_rows < num_ranks:
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
        schemas = {each.name: pa.ipc.read_schema(pa.py_buffer(each.schema)) for each in self.specs}
        if not isinstance(name, str) or any(name in each.names for each in schemas.values()):
            return None
        have = (f"{data} has the columns {', '.join(schemas[data].names)}" for data in schemas)
        return f"If '{name}' is meant as a column: {'; '.join(have)}."

    def frame(self, num_nodes: int, ranks_per_node: int) -> Any:
        """Return a DataFrame with a partition for each node, which Spark has on its disks."""
        from pyspark import StorageLevel

        epochs = self._resumed_epochs()
        key = (num_nodes, ranks_per_node, tuple(sorted((name, epochs[name]) for name in epochs)))
        if self._frame and self._frame[0] == key:
            return self._frame[1]
        self._free_frame()
        frame = distributed(self._datasets, num_nodes, ranks_per_node, epochs)
        frame.persist(StorageLevel.DISK_ONLY)
        self._frame = key, frame
        # Not a count, which would be another stage.
        self._jobs.run(frame.select("node"), "Rows for the ranks")
        return frame

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
            if "history" in position and sizes.get(position["name"]) == position["rows"]
        }

    def file(self) -> BinaryIO:
        """Return a file with all chunks, for ranks on this machine."""
        if self._file is None:
            folder = _folder(self._jobs.session)
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
            self._jobs.run(frame, f"Rows of {dataset.spec.name} for ranks here", write)
        writer.finish(0)

    def _close(self) -> None:
        self._free_frame()
        if self._file is not None:
            self._file.close()

    def _free_frame(self) -> None:
        if self._frame is not None:
            with contextlib.suppress(Exception):  # the session may have ended
                self._frame[1].unpersist()
        self._frame = None


def _folder(session: Session) -> str:
    """Return a folder on this machine for the rows."""
    if session.is_connect:
        return tempfile.gettempdir()
    return os.path.abspath(private.temporary_folder(session.spark.sparkContext))


def _describe(spec: DatasetSpec, num_ranks: int) -> str:
    layout = spec.layout
    size = format_bytes(float(spec.chunk_bytes.sum()))
    rows = f"{spec.name}: {counted(layout.num_rows, 'row')} ({size})"
    if not spec.split:
        return f"{rows}, all for each of {counted(num_ranks, 'rank')}"
    per_rank = layout.rows_per_rank(num_ranks)
    difference = sum(per_rank) - layout.num_rows
    note = ""
    if difference < 0:
        note = f"; {counted(-difference, 'row')} dropped"
    if difference > 0:
        note = f"; {counted(difference, 'row')} repeated"
    least, most = min(per_rank), max(per_rank)
    share = f"{most}" if least == most else f"{least} or {most}"
    return f"{rows}, {share} for each of {counted(num_ranks, 'rank')}{note}"
