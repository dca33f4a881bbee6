"""A dataset as numbered chunks, which a rank reads one at a time, and how ranks share its rows."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

# Drop the rows that are left over, repeat some rows, or (False) leave a difference of one row.
Equal: TypeAlias = Literal["drop", "pad", False]


def check_sharing(equal: object, split: object) -> None:
    if equal is not False and equal not in ("drop", "pad"):
        raise ValueError(f"equal must be 'pad', 'drop' or False, but is {equal!r}.")
    if not isinstance(split, bool):
        raise TypeError(f"split must be True or False, but is {split!r}.")


class Source(Protocol):
    """A dataset as chunks of rows, with what every rank knows of all of them."""

    name: str
    schema: pa.Schema
    vectors: frozenset[str]  # the columns of Spark ML vectors, as structs
    chunk_rows: NDArray[np.int64]  # of the whole dataset
    chunk_bytes: NDArray[np.int64]  # in memory, at least roughly
    null_counts: Mapping[str, int] | None  # of columns of the whole dataset, if it is known

    def read(self, chunk: int) -> pa.RecordBatch | pa.Table:
        """Read a chunk; raises LookupError if this rank cannot."""

    def release(self, chunk: int) -> None:
        """Free memory of a chunk that has been read. It can be read again, and views stay valid."""


class CachedSource:
    """A source that keeps the chunks read last, within this process."""

    def __init__(self, source: Source, max_bytes: float) -> None:
        self.name, self.schema, self.vectors = source.name, source.schema, source.vectors
        self.chunk_rows, self.chunk_bytes = source.chunk_rows, source.chunk_bytes
        self.null_counts = source.null_counts
        self._source, self._max_bytes = source, max_bytes
        self._chunks: dict[int, pa.RecordBatch | pa.Table] = {}  # the least recently used first
        self._size = 0

    def read(self, chunk: int) -> pa.RecordBatch | pa.Table:
        found = self._chunks.pop(chunk, None)
        if found is None:
            found = self._source.read(chunk)
            self._size += int(self.chunk_bytes[chunk])
        self._chunks[chunk] = found
        while self._size > self._max_bytes and len(self._chunks) > 1:
            oldest = next(iter(self._chunks))
            del self._chunks[oldest]
            self._source.release(oldest)
            self._size -= int(self.chunk_bytes[oldest])
        return found

    def release(self, chunk: int) -> None:
        """Do nothing: chunks are kept while there is room."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_chunks": {}, "_size": 0}


_OF_THIS_PROCESS = secrets.token_hex(8)  # what another process has saved is no share


class RankShare:
    """A dataset of PyTorch that samplers and data loaders must not divide among the ranks."""

    rows_of_all_ranks: int  # of the dataset of which it is a share


def share_description(rows: int) -> str:
    """Return what marks a dataset of Hugging Face's as a share, of so many rows of all ranks.

    The description is in what ``map``, ``filter``, ``shuffle`` and the like make of it, too.
    """
    return f"One rank's share of {rows} rows ({_OF_THIS_PROCESS})"


def is_rank_share(dataset: object) -> bool:
    """Return whether a dataset is one rank's share, or consists of such datasets."""
    return all(_rows_of_all_ranks(part) is not None for part in _parts(dataset))


def rows_of_all_ranks(dataset: object) -> int:
    """Return the rows of all ranks of which a dataset has one rank's share."""
    return sum(_rows_of_all_ranks(part) or 0 for part in _parts(dataset))


def _rows_of_all_ranks(part: object) -> int | None:
    if isinstance(part, RankShare):
        return part.rows_of_all_ranks
    described = getattr(getattr(part, "info", None), "description", None)
    found = re.search(rf"share of (\d+) rows \({_OF_THIS_PROCESS}\)", str(described))
    return int(found[1]) if found else None


def _parts(dataset: object) -> list[object]:
    from torch.utils.data import ConcatDataset, Subset

    if isinstance(dataset, Subset):
        return _parts(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [part for each in dataset.datasets for part in _parts(each)]
    return [dataset]
