"""Where the rows of a dataset come from: numbered chunks, which a rank reads one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


class Source(Protocol):
    """A dataset as chunks of rows, with what every rank knows of all of them."""

    @property
    def name(self) -> str:
        """The dataset's name, for messages."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""

    @property
    def vectors(self) -> frozenset[str]:
        """The columns that contain Spark ML vectors, as structs."""

    @property
    def chunk_rows(self) -> NDArray[np.int64]:
        """The number of rows of each chunk of the whole dataset."""

    @property
    def chunk_bytes(self) -> NDArray[np.int64]:
        """The size of each chunk in memory, in bytes, at least roughly."""

    @property
    def null_counts(self) -> Mapping[str, int] | None:
        """The number of nulls of each column of the whole dataset; None if it is not known."""

    def read(self, chunk: int) -> pa.RecordBatch | pa.Table:
        """Read a chunk.

        Raises
        ------
        LookupError
            If this rank cannot read it.
        """

    def release(self, chunk: int) -> None:
        """Free memory of a chunk that has been read. It can be read again, and views stay valid."""


class CachedSource:
    """A source that keeps the chunks read last, within this process.

    Parameters
    ----------
    source : Source
        The source of the chunks.
    max_bytes : float
        The size of the chunks that are kept at most; infinite keeps all.
    """

    def __init__(self, source: Source, max_bytes: float) -> None:
        self.name, self.schema, self.vectors = source.name, source.schema, source.vectors
        self.chunk_rows, self.chunk_bytes = source.chunk_rows, source.chunk_bytes
        self.null_counts = source.null_counts
        self._source, self._max_bytes = source, max_bytes
        self._chunks: dict[int, pa.RecordBatch | pa.Table] = {}  # the least recently used first
        self._size = 0

    def read(self, chunk: int) -> pa.RecordBatch | pa.Table:
        """Return a chunk."""
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
