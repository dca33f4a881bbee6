"""Where the rows of a dataset come from: numbered chunks, which a rank reads one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

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
