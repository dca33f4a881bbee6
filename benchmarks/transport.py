"""Ways for a DataFrame's rows to reach the nodes of a run: until the first batch, and again.

Ranks are left out: the barrier task of each node reads the first batch itself.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import loaders
from benchmarks.loaders import BATCH, SCALARS
from benchmarks.measure import Driven, apart
from benchmarks.peers import Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import EMBEDDED, session
from benchmarks.turns import Effort, measured
from distributor.core.extras import DISTRIBUTION

NODES = 2
ROWS, FEW_ROWS = 4_000_000, 40_000
FIRST, AGAIN, UNEQUAL = "until the first batch", "again, after a failure", "rows of nodes differ by"
REPEATS = 4
"""Times in one session, of which the first is not counted: the JVM compiles its code then."""
DEADLINE = 600.0

Attempt = Callable[[], list[int]]
"""Brings the rows to the nodes; returns how many each of them has."""


class Case(NamedTuple):
    """A way, and the number of rows."""

    peer: Peer
    rows: int

    @property
    def title(self) -> str:
        return titled(self.rows)


def titled(rows: int) -> str:
    """Return the title of a case."""
    return f"{SCALARS}, {rows:,} rows to {NODES} nodes"


@contextmanager
def chunks(spark: Any, frame: Any) -> Iterator[Attempt]:
    """Pack the rows in a job before; move chunks to the nodes. This is what the package does."""
    from distributor.control.cancellation import Cancellation
    from distributor.data import from_spark
    from distributor.launchers.spark.datasets.collection import Datasets
    from distributor.spark.call_site import CallSite

    datasets = Datasets([replace(from_spark(frame, equal=False), name="rows")])
    with datasets.opened("benchmark", CallSite.of_caller("benchmark"), None, Cancellation()):
        specs = datasets.specs

        def task(batches: Iterator[Any]) -> Iterator[Any]:
            from distributor.data.chunk_file import ChunkSource, write_chunks

            with write_chunks(batches, specs, 1, tempfile.gettempdir()) as file:
                source = ChunkSource(f"/proc/self/fd/{file.fileno()}", 0)
                [places] = source._contents.places
                _to_tensors(source.read(min(places)))
                yield _result(specs[0].layout.rows_per_rank(NODES)[source._contents.first_share])

        yield lambda: _run(datasets.frame(NODES, 1), task)


@contextmanager
def barrier_input(spark: Any, frame: Any) -> Iterator[Attempt]:
    """Pass the rows to the barrier job itself, as PySpark's class does."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        rows = 0
        with tempfile.TemporaryFile() as file:
            writer = None
            for batch in batches:
                writer = writer or pa.ipc.new_stream(file, batch.schema)
                writer.write_batch(batch)
                rows += batch.num_rows
            if writer is not None:
                writer.close()
            file.seek(0)
            first = pa.ipc.open_stream(file).read_next_batch()
            _to_tensors(first)
        yield _result(rows)

    yield lambda: _run(frame.repartition(NODES), task)


@contextmanager
def shared_files(spark: Any, frame: Any) -> Iterator[Attempt]:
    """Write Arrow files in a job before, into storage that all nodes share."""
    with tempfile.TemporaryDirectory() as folder:

        def write(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow as pa
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            writer, rows = None, 0
            path = Path(folder, f"{context.partitionId():06d}.arrow")
            for batch in batches:
                writer = writer or pa.ipc.new_file(path, batch.schema)
                writer.write_batch(batch)
                rows += batch.num_rows
            if writer is not None:
                writer.close()
            yield _result(rows)

        total = sum(each.rows for each in frame.mapInArrow(write, "rows long").collect())

        def task(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow as pa

            for batch in batches:
                node = batch["id"][0].as_py()
            begin, end = (total * at // NODES for at in (node, node + 1))
            at = rows = 0
            for path in sorted(Path(folder).iterdir()):
                file = pa.ipc.open_file(pa.memory_map(str(path)))
                for number in range(file.num_record_batches):
                    found = file.get_batch(number)
                    first, last = max(begin - at, 0), min(end - at, found.num_rows)
                    if first < last and not rows:
                        _to_tensors(found.slice(first))
                    rows += max(last - first, 0)
                    at += found.num_rows
            yield _result(rows)

        yield lambda: _run(spark.range(0, NODES, 1, NODES), task)


WAYS = {
    peer.name: peer
    for peer in (
        Peer("ours", "chunks, in a job before", chunks, DISTRIBUTION),
        Peer("barrier_input", "the barrier job's own input", barrier_input, "pyspark"),
        Peer("shared_files", "Arrow files in shared storage", shared_files, "pyspark"),
    )
}


def measure(effort: Effort) -> list[Row]:
    """Measure the ways."""
    if effort.families and "ours" not in effort.families:
        return []
    rows = FEW_ROWS if effort.quick else ROWS
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "rows"))
        apart(loaders.write_rows, DEADLINE, tables=[(SCALARS, rows, data)])
        cases = [Case(peer, rows) for peer in WAYS.values()]
        return measured(
            cases,
            effort.few_rounds,
            lambda case: apart(drive, DEADLINE, way=case.peer.name, folder=data),
            _rows,
        )


def drive(way: str, folder: str) -> dict[str, Any]:
    """Bring the rows to the nodes several times, twice each."""
    found: list[dict[str, float]] = []
    with session(EMBEDDED) as spark:
        for _ in range(REPEATS):
            found.append(_timed(spark, WAYS[way], folder))
    return {key: [each[key] for each in found[1:]] for key in found[0]}


def _timed(spark: Any, way: Peer, folder: str) -> dict[str, float]:
    began = time.perf_counter()
    with way.open(spark, spark.read.parquet(folder)) as attempt:
        attempt()
        first = time.perf_counter()
        counts = attempt()
        again = time.perf_counter() - first
    return {"first": first - began, "again": again, "unequal": max(counts) - min(counts)}


def _run(frame: Any, task: Callable[[Iterator[Any]], Iterator[Any]]) -> list[int]:
    return [each.rows for each in frame.mapInArrow(task, "rows long", barrier=True).collect()]


def _to_tensors(rows: Any) -> None:
    """Convert the first batch of an Arrow record batch."""
    import pyarrow as pa

    table = pa.Table.from_batches([rows.slice(0, BATCH)])
    for column in table.columns:
        loaders.converted(column)


def _result(rows: int) -> Any:
    import pyarrow as pa

    return pa.record_batch([pa.array([rows], pa.int64())], ["rows"])


def _rows(case: Case, measurements: Sequence[Driven]) -> list[Row]:
    found = list(measurements)
    return [
        row(case.peer, case.title, FIRST, gathered(found, "first")),
        row(case.peer, case.title, AGAIN, gathered(found, "again")),
        row(case.peer, case.title, UNEQUAL, gathered(found, "unequal"), "rows"),
    ]
