"""The rows of DataFrames as chunks, and the file of a node's chunks, which the node's ranks map.

The file contains each chunk as a message of Arrow's IPC format (aligned), then the pickled
`Contents` and the size of that. It has no name: it is gone with the last process that has it open.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import pickle
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa

from distributor.core.resources import format_bytes
from distributor.data.epochs import Layout
from distributor.errors import DistributorError, ExecutorNotReady
from distributor.rank.context import worker_context

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT = 64
_SIZE = struct.Struct("<Q")
_OTHER_ROWS = (
    "The DataFrame {name} has other rows than when the run started: Spark lost an executor, "
    "computed a part of the DataFrame again, and found other rows there, or the same in another "
    "order. Write the DataFrame to storage and pass what is read from there, or make it "
    "deterministic: sort before functions that depend on the order of rows, and give rand() a seed."
)


@dataclass(frozen=True, eq=False)
class DatasetSpec:
    """What every rank knows of a dataset."""

    name: str  # for messages and in checkpoints
    schema: pa.Schema
    vectors: frozenset[str]
    layout: Layout
    checksums: NDArray[np.int64]  # the CRC-32 of each chunk
    null_counts: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Contents:
    datasets: Sequence[DatasetSpec]
    places: Sequence[Mapping[int, tuple[int, int]]]  # by dataset and chunk: the offset and the size
    first_share: int  # of the node's first rank


class ChunkFileWriter:
    def __init__(self, file: BinaryIO, datasets: Sequence[DatasetSpec]) -> None:
        self._file = file
        self._datasets = datasets
        self._places: list[dict[int, tuple[int, int]]] = [{} for _ in datasets]

    def add(self, dataset: int, chunk: int, message: Any) -> None:
        """Write a chunk, as a message of Arrow's IPC format, unless the file has it."""
        if chunk in self._places[dataset]:
            return
        spec, size = self._datasets[dataset], memoryview(message).nbytes
        if zlib.crc32(message) != spec.checksums[chunk]:
            raise DistributorError(_OTHER_ROWS.format(name=spec.name))
        self._places[dataset][chunk] = (self._file.tell(), size)
        self._file.write(message)
        self._file.write(bytes(-size % ALIGNMENT))

    def finish(self, first_share: int) -> None:
        contents = pickle.dumps(Contents(self._datasets, self._places, first_share))
        self._file.write(contents + _SIZE.pack(len(contents)))
        self._file.flush()


class ChunkSource:
    """Reads one dataset's chunks from a file of chunks; a `Source`."""

    # The path, perhaps of a descriptor, exists as long as a process has the file open.

    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._number = number
        self._contents, self._mapped = _contents_of(path)
        self._buffer = pa.py_buffer(self._mapped)
        spec = self._contents.datasets[number]
        self.name, self.schema, self.vectors = spec.name, spec.schema, spec.vectors
        self.chunk_rows, self.chunk_bytes = spec.layout.chunk_rows, spec.layout.chunk_bytes
        self.null_counts: Mapping[str, int] | None = spec.null_counts

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path, self._number)

    def read(self, chunk: int) -> pa.RecordBatch:
        offset, size = self._contents.places[self._number][chunk]
        return pa.ipc.read_record_batch(self._buffer.slice(offset, size), self.schema)

    def release(self, chunk: int) -> None:
        """Unmap a chunk's pages, which remain in the system's cache, until it is read again."""
        offset, size = self._contents.places[self._number][chunk]
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapped.madvise(mmap.MADV_DONTNEED, start, offset + size - start)


def _contents_of(path: str) -> tuple[Contents, mmap.mmap]:
    status = os.stat(path)
    return _read(path, status.st_ino, status.st_ctime_ns)


@functools.lru_cache(1)
def _read(path: str, inode: int, changed: int) -> tuple[Contents, mmap.mmap]:
    # By more than the path: that of a descriptor may be another file's later.
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = memoryview(mapped)
    (size,) = _SIZE.unpack(view[-_SIZE.size :])
    contents = pickle.loads(view[-_SIZE.size - size : -_SIZE.size])
    return contents, mapped


def open_source(number: int) -> tuple[ChunkSource, Layout, int, int]:
    """Return the source of a dataset, its layout, this rank's share, and the number of ranks."""
    descriptor = worker_context().data
    if descriptor is None:
        raise RuntimeError(
            "The rows of a DataFrame are only available in the ranks of the run that it was "
            "passed to."
        )
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    contents, _ = _contents_of(path)
    share = contents.first_share + int(os.environ.get("LOCAL_RANK", 0))
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    return ChunkSource(path, number), contents.datasets[number].layout, share, num_ranks


# What describes a chunk: its task and its number there, its size, and the nulls in each column.
#
# The nulls are a list in JSON. The columns' names here are not those of the DataFrame.
INDEX_COLUMNS = (
    "part int, number int, num_rows long, num_bytes long, checksum long, nulls string, "
    "schema binary"
)
CHUNK_COLUMNS = f"{INDEX_COLUMNS}, message binary"


def pack(argument: bytes, batches: Iterator[pa.RecordBatch], _: str) -> Iterator[pa.RecordBatch]:
    """Pack a partition's rows into chunks; a task of ``mapInArrow``."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    part = context.partitionId()
    chunk_bytes = json.loads(argument)[0]
    for number, rows in enumerate(_grouped(batches, chunk_bytes)):
        message = rows.serialize()
        schema = rows.schema.serialize().to_pybytes()
        nulls = [column.null_count for column in rows.columns]
        yield pa.record_batch(
            [
                pa.array([part], pa.int32()),
                pa.array([number], pa.int32()),
                pa.array([rows.num_rows], pa.int64()),
                pa.array([message.size], pa.int64()),
                pa.array([zlib.crc32(message)], pa.int64()),
                pa.array([json.dumps(nulls)], pa.string()),
                pa.array([schema if number == 0 else None], pa.binary()),
                _binary(message),
            ],
            [column.split()[0] for column in CHUNK_COLUMNS.split(", ")],
        )


def _grouped(batches: Iterator[pa.RecordBatch], chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """Combine and split batches so that each has about `chunk_bytes`."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
        step = max(1, chunk_bytes // row_bytes)
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            waiting.append(part)
            size += part.nbytes
            if size >= chunk_bytes:
                yield _combined(waiting)
                waiting, size = [], 0
    if waiting:
        yield _combined(waiting)


def _combined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    [combined] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return combined


def _binary(message: pa.Buffer) -> pa.Array:
    """Return an array of one binary value, without a copy."""
    offsets = pa.py_buffer(np.array([0, message.size], dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, offsets, message])


def write_chunks(
    batches: Iterator[pa.RecordBatch],
    datasets: Sequence[DatasetSpec],
    ranks_per_node: int,
    folder: str,
) -> BinaryIO:
    """Write the chunks that Spark passes to a node into a file without a name."""
    file = tempfile.TemporaryFile(dir=folder)
    writer = ChunkFileWriter(file, datasets)
    node = 0
    try:
        for batch in batches:
            nodes, numbers, chunks, messages = batch.columns
            node = nodes[0].as_py()
            places = zip(numbers.to_pylist(), chunks.to_pylist(), messages, strict=True)
            for dataset, chunk, message in places:
                writer.add(dataset, chunk, message.as_buffer())
        writer.finish(node * ranks_per_node)
    except OSError as error:
        size = format_bytes(file.tell())
        raise ExecutorNotReady(
            f"The rows for a node's ranks cannot be written to {folder} ({error}) after {size}. "
            "Free space there, or set spark.local.dir to a larger disk."
        ) from error
    return file
