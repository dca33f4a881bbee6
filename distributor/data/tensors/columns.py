"""Columns of Arrow tables become tensors: one class for each kind of column.

A column is converted from its chunks. Numbers are copied once, without a Python object for each
row. They must be copied, because Arrow's memory may be a read-only map that other ranks share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

Values: TypeAlias = "torch.Tensor | list[Any] | dict[str, Any]"
"""What a column becomes."""


class Column(Protocol):
    """Converts the columns of one type."""

    def convert(self, chunks: Sequence[pa.Array]) -> Values:
        """Convert a column.

        Raises
        ------
        ValueError
            If it contains nulls that nothing replaces, or values that do not fit.
        """

    def check_nulls(self, count: int) -> None:
        """Raise a ValueError if the column contains nulls, so many, that nothing replaces."""

    def leaves(self) -> Iterator[Leaf]:
        """Yield the columns of plain values that it consists of."""


@dataclass(frozen=True)
class Leaf:
    """A column of plain values.

    Parameters
    ----------
    path : str
        The column's name. The names of a struct and its field are joined by a dot.
    label : str
        What messages call it.
    fill : pyarrow.Scalar or None
        What replaces nulls.
    """

    path: str
    label: str
    fill: pa.Scalar | None

    def convert(self, chunks: Sequence[pa.Array]) -> Values:
        raise NotImplementedError

    def check_nulls(self, count: int, label: str = "") -> None:
        if count and self.fill is None:
            raise ValueError(
                f"{label or self.label} has {describe_nulls(count)}. Drop their rows, or say what "
                f"replaces them, as in fill={{{self.path!r}: {self._example()}}}."
            )

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def _example(self) -> str:
        return "0"

    def _filled(self, chunks: Sequence[pa.Array]) -> Sequence[pa.Array]:
        nulls = count_nulls(chunks)
        self.check_nulls(nulls)
        if not nulls or self.fill is None:
            return chunks
        return [chunk.cast(self.fill.type, safe=False).fill_null(self.fill) for chunk in chunks]


@dataclass(frozen=True)
class Numbers(Leaf):
    """Values of a type that torch has, possibly after a conversion by Arrow.

    Parameters
    ----------
    types : tuple of pyarrow.DataType
        The types that Arrow converts to, one after the other.
    dtype : torch.dtype or None
        The dtype of the tensor; None is that of the last of `types`.
    """

    types: tuple[pa.DataType, ...]
    dtype: torch.dtype | None

    def convert(self, chunks: Sequence[pa.Array]) -> torch.Tensor:
        chunks = self._filled([self._cast(_decoded(chunk)) for chunk in chunks])
        tensor = torch.from_numpy(
            joined([numpy_view(chunk) for chunk in chunks], _numpy_dtype(self.types[-1]))
        )
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def _example(self) -> str:
        return "False" if pa.types.is_boolean(self.types[-1]) else "0"

    def _cast(self, chunk: pa.Array) -> pa.Array:
        safe = getattr(chunk.type, "unit", None) != "ns"  # nanoseconds are truncated
        try:
            for kind in self.types:
                chunk = chunk if chunk.type == kind else chunk.cast(kind, safe=safe)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{self.label} has a value that does not fit {self.types[-1]}: {error}"
            ) from None
        return chunk


@dataclass(frozen=True)
class Texts(Leaf):
    """Strings or bytes, which remain a list.

    Parameters
    ----------
    is_binary : bool
        Whether they are bytes.
    """

    is_binary: bool

    def convert(self, chunks: Sequence[pa.Array]) -> list[Any]:
        values: list[Any] = []
        for chunk in self._filled([_decoded(chunk) for chunk in chunks]):
            values += chunk.to_numpy(zero_copy_only=False).tolist()
        return values

    def _example(self) -> str:
        return "b''" if self.is_binary else "''"


def describe_nulls(count: int) -> str:
    """Return a number of nulls, for a message."""
    return f"{count:,} null{'s' * (count > 1)}"


def count_nulls(chunks: Sequence[pa.Array]) -> int:
    """Return the number of nulls of all chunks."""
    return sum(chunk.null_count for chunk in chunks)


def _decoded(chunk: pa.Array) -> pa.Array:
    return chunk.dictionary_decode() if isinstance(chunk, pa.DictionaryArray) else chunk


def numpy_view(array: pa.Array) -> NDArray[Any]:
    """Return numbers or booleans without nulls; numbers are not copied.

    ``Array.to_numpy`` does the same, but imports pandas, which takes longer than a rank's start.
    """
    if pa.types.is_boolean(array.type):
        return numpy_view(array.cast(pa.uint8())).view(np.bool_)
    dtype = _numpy_dtype(array.type)
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _numpy_dtype(kind: pa.DataType) -> np.dtype[Any]:
    return np.dtype({"halffloat": "float16", "float": "float32"}.get(str(kind), str(kind)))


def joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Copy arrays into one; without any, it is empty and has that dtype."""
    return np.concatenate(arrays or [np.empty(0, dtype)])
