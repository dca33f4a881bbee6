"""What the driver passes to each task, and the rows that the task returns.

The rows have what did not reach the driver over the link.
"""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from distributor.core.addresses import host_name
from distributor.core.files import atomic_path, for_this_user
from distributor.core.resources import format_bytes
from distributor.core.text import listed
from distributor.errors import ValueTooLarge
from distributor.node.process.specs import NodeShare
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import PART_BYTES, Value
from distributor.serialization.program import Program
from distributor.spark.shipped_files import ProgramFile
from distributor.wire.messages import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from distributor.data.chunk_file import DatasetSpec


class Shipped(NamedTuple):
    """What Spark copies to each executor that runs a task: files, by their names there.

    Parameters
    ----------
    program : Program or ProgramFile
        What each rank runs, which is no file if it is small, or the file that contains it.
    modules : str or None
        The archive with the user's modules.
    environment : str, tuple of str or None
        What the ranks run in: a folder, requirements, or None for the executors' own interpreter.
    """

    program: Program | ProgramFile
    modules: str | None
    environment: str | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What the driver passes to every task of a run, pickled with the task.

    Parameters
    ----------
    share : NodeShare
        What all nodes have; each task fills in the rest.
    shipped : Shipped
        What Spark has copied to their executors.
    use_gpu : bool
        Whether the ranks use the GPUs that Spark assigns to their task.
    driver_gpus : tuple of str
        In ``local[n]``: the driver's GPUs, one for each rank.
    gpu_type : str or None
        The required type of GPU.
    hub : tuple of str and int
        The address and port of the driver's hub.
    secret : bytes
        The run's secret, with which nodes and the hub authenticate each other.
    log_dir : str or None
        Folder for the ranks' output if the hub cannot be reached.
    max_spark_result_bytes : int
        Bytes that Spark can carry from one task to the driver: values, and reports of nodes without
        a link.
    datasets : tuple of DatasetSpec
        The datasets, whose rows Spark passes to the tasks.
    cache_dir : str or None
        The cache of environments on a node whose own environment variables name none.
    check_memory : bool
        Whether nodes compare the memory that ranks need with the memory that they have.
    """

    share: NodeShare
    shipped: Shipped
    use_gpu: bool
    driver_gpus: tuple[str, ...]
    gpu_type: str | None
    hub: tuple[str, int]
    secret: bytes = field(repr=False)
    log_dir: str | None
    max_spark_result_bytes: int
    datasets: tuple[DatasetSpec, ...]
    cache_dir: str | None
    check_memory: bool


@dataclass(frozen=True)
class MemberSpec:
    """What the driver passes to every task that holds a slot for a run, pickled with the task.

    Parameters
    ----------
    hub : tuple of str and int
        The address and port of the driver's hub for these tasks.
    secret : bytes
        With which the tasks and that hub authenticate each other.
    job : int
        Which of the run's jobs this is.
    """

    hub: tuple[str, int]
    secret: bytes = field(repr=False)
    job: int


ROW_SCHEMA = "rank int, part int, data binary"
"""The rows' schema, as Spark writes it. A value is split into parts, numbered from 0."""
REPORTS_PART = -1
"""The part number of a row that has `Output` messages instead of a part of a value."""


class UnsentReports:
    """Reports that no link could carry, compressed in a file, until they become rows."""

    def __init__(self) -> None:
        self._waiting: list[Output] = []
        self._waiting_bytes = 0
        self._rank = 0
        self._sizes: list[int] = []  # of the pieces in the file
        self._left_out = 0

    def add(self, report: Output) -> None:
        """Add a report, which never fails: if the disk is full, the report is left out."""
        self._rank = report.rank
        self._waiting.append(report)
        self._waiting_bytes += len(report.data)
        if self._waiting_bytes > PART_BYTES:
            self._write()

    def rows(self, room: int) -> Iterator[pa.RecordBatch]:
        """Yield the reports, in order, as rows of at most so many bytes in all.

        If that is too little, the last row has a message about it that the driver shows.
        """
        if self._waiting:
            self._write()
        if self._sizes:
            self._file.seek(0)
        for number, size in enumerate(self._sizes):
            if size > room:
                self._left_out += sum(self._sizes[number:])
                break
            room -= size
            yield _row(self._rank, REPORTS_PART, self._file.read(size))
        if self._left_out:
            text = (
                f"distributor: {format_bytes(self._left_out)} of compressed reports of this node "
                "are missing: it had no link to the driver, and neither its disk nor Spark has "
                "room for them (spark.driver.maxResultSize, and a quarter of spark.driver.memory "
                "and spark.executor.memory). Make the driver reachable from the executors "
                "(hub_address), or report less often.\n"
            )
            message = Output(self._rank, "stderr", text.encode())
            yield _row(self._rank, REPORTS_PART, packed([message]))

    @functools.cached_property
    def _file(self) -> BinaryIO:
        return tempfile.TemporaryFile(buffering=0)

    def _write(self) -> None:
        piece = packed(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        try:
            self._file.seek(sum(self._sizes))
            is_written = self._file.write(piece) == len(piece)
        except OSError:
            is_written = False
        if is_written:
            self._sizes.append(len(piece))
        else:
            self._left_out += len(piece)


def packed(reports: list[Output]) -> bytes:
    """Return reports as the data of a row."""
    return zlib.compress(pickle.dumps(reports), 1)


def unpacked(data: bytes) -> list[Output]:
    """Return the reports of a row."""
    reports: list[Output] = pickle.loads(zlib.decompress(data))
    return reports


def rows_of(values: Iterable[Value]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of values."""
    for value in values:
        for part, data in enumerate(value.parts()):
            yield _row(value.rank, part, bytes(data))


def _row(rank: int, part: int, data: bytes) -> pa.RecordBatch:
    import pyarrow as pa

    schema = pa.schema([("rank", pa.int32()), ("part", pa.int32()), ("data", pa.binary())])
    columns: list[list[Any]] = [[rank], [part], [data]]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def late_output_in(rows: Iterable[Any]) -> Iterator[Output]:
    """Yield what ranks reported that no link could carry."""
    for row in rows:
        if row.part == REPORTS_PART:
            yield from unpacked(row.data)


def values_in(rows: Iterable[Any]) -> dict[int, Value]:
    """Return the values among rows, by rank, each put together from its parts."""
    values: dict[int, Value] = {}
    parts = (row for row in rows if row.part != REPORTS_PART)
    for row in sorted(parts, key=lambda row: (row.rank, row.part)):
        if row.rank not in values:
            values[row.rank] = Value(row.rank, anonymous_file())
        values[row.rank].file.write(row.data)
    return values


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
