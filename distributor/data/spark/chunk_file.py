"""The file with a node's chunks of the run's datasets, which the node's ranks map.

It contains each chunk as a message of Arrow's IPC format (aligned), then the pickled `Contents`
and the size of that. It has no name, so that it is gone with the last process that has it open.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa

from distributor.data.epochs import Layout
from distributor.data.equal_shares import Equal
from distributor.errors import DistributorError
from distributor.rank.context import worker_context

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from distributor.data.shard import DatasetShard

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
    """What every rank knows of a dataset.

    Parameters
    ----------
    name : str
        The dataset's name, for messages and in checkpoints.
    schema : bytes
        The columns, as a message of Arrow's IPC format.
    vectors : frozenset of str
        The columns that contain Spark ML vectors.
    chunk_rows, chunk_bytes : array of int64, shape (chunks,)
        The rows and the size of each chunk of the whole dataset.
    checksums : array of int64, shape (chunks,)
        The CRC-32 of each chunk.
    null_counts : mapping of str to int
        The number of nulls in each column.
    equal : "drop", "pad" or False
        How ranks get equally many rows.
    split : bool
        Whether the ranks share the dataset.
    """

    name: str
    schema: bytes
    vectors: frozenset[str]
    chunk_rows: NDArray[np.int64]
    chunk_bytes: NDArray[np.int64]
    checksums: NDArray[np.int64]
    null_counts: Mapping[str, int]
    equal: Equal
    split: bool

    @functools.cached_property
    def layout(self) -> Layout:
        """How the ranks share the dataset."""
        return Layout(self.chunk_rows, self.chunk_bytes, self.equal, self.split)


@dataclass(frozen=True, eq=False)
class Contents:
    """What a file contains.

    Parameters
    ----------
    datasets : sequence of DatasetSpec
        The datasets.
    places : sequence of mapping of int to (int, int)
        For each dataset, the offset and the size of each chunk that is in the file.
    first_share : int
        The share of the node's first rank.
    """

    datasets: Sequence[DatasetSpec]
    places: Sequence[Mapping[int, tuple[int, int]]]
    first_share: int


class ChunkFileWriter:
    """Writes a file of chunks.

    Parameters
    ----------
    file : BinaryIO
        An empty file.
    datasets : sequence of DatasetSpec
        The datasets.
    """

    def __init__(self, file: BinaryIO, datasets: Sequence[DatasetSpec]) -> None:
        self._file = file
        self._datasets = datasets
        self._places: list[dict[int, tuple[int, int]]] = [{} for _ in datasets]
        self._end = 0

    def add(self, dataset: int, chunk: int, message: Any) -> None:
        """Write a chunk, as a message of Arrow's IPC format, unless the file has it.

        Raises
        ------
        DistributorError
            If it is not what Spark had computed first.
        """
        if chunk in self._places[dataset]:
            return
        spec, size = self._datasets[dataset], memoryview(message).nbytes
        if zlib.crc32(message) != spec.checksums[chunk]:
            raise DistributorError(_OTHER_ROWS.format(name=spec.name))
        self._places[dataset][chunk] = (self._end, size)
        self._file.write(message)
        self._file.write(bytes(-size % ALIGNMENT))
        self._end += size + -size % ALIGNMENT

    def finish(self, first_share: int) -> None:
        """Write the contents; `first_share` is the share of the node's first rank."""
        contents = pickle.dumps(Contents(self._datasets, self._places, first_share))
        self._file.write(contents + _SIZE.pack(len(contents)))
        self._file.flush()


class ChunkSource:
    """Reads one dataset's chunks from a file of chunks; a `Source`.

    Parameters
    ----------
    path : str
        A path of the file, which exists as long as a process has it open.
    number : int
        The number of the dataset in the file.
    """

    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._number = number
        self._contents, self._mapped = _contents_of(path)
        self._buffer = pa.py_buffer(self._mapped)
        self._spec = self._contents.datasets[number]
        self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(self._spec.schema))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path, self._number)

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self._spec.name

    @property
    def vectors(self) -> frozenset[str]:
        """The columns that contain Spark ML vectors."""
        return self._spec.vectors

    @property
    def chunk_rows(self) -> NDArray[np.int64]:
        """The number of rows of each chunk."""
        return self._spec.chunk_rows

    @property
    def chunk_bytes(self) -> NDArray[np.int64]:
        """The size of each chunk."""
        return self._spec.chunk_bytes

    @property
    def null_counts(self) -> Mapping[str, int]:
        """The number of nulls of each column."""
        return self._spec.null_counts

    def read(self, chunk: int) -> pa.RecordBatch:
        """Return a chunk, as a view of the file.

        Raises
        ------
        KeyError
            If it is not in the file.
        """
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
    """Map a file; the path of a descriptor may be another file's later."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = memoryview(mapped)
    (size,) = _SIZE.unpack(view[-_SIZE.size :])
    contents = pickle.loads(view[-_SIZE.size - size : -_SIZE.size])
    return contents, mapped


def open_source(number: int) -> tuple[ChunkSource, Layout, int, int]:
    """Return the source of a dataset, its layout, this rank's share, and the number of ranks.

    Raises
    ------
    RuntimeError
        If this process is not a rank of a run with datasets.
    """
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


def open_shard(number: int) -> DatasetShard:
    """Return this rank's shard of the dataset with this number."""
    from distributor.data.shard import DatasetShard

    return DatasetShard(*open_source(number))
