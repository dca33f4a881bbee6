"""Columns of Arrow tables become tensors: one class for each kind of column.

A column is converted from its chunks. Numbers are copied once, without a Python object for each
row. They must be copied, because Arrow's memory may be a read-only map that other ranks share;
except those of columns whose memory nothing else reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


Values: TypeAlias = "torch.Tensor | list[Any] | dict[str, Any]"  # what a column becomes
# What arrays become whose lengths may differ.
Ragged: TypeAlias = Literal["error", "nested", "list"]


class Column(Protocol):
    """Converts the columns of one type."""

    def convert(self, chunks: Sequence[pa.Array]) -> Values:
        """Convert a column; raises ValueError for nulls without a `fill`, and what does not fit."""

    def check_nulls(self, count: int) -> None:
        """Raise a ValueError if the column contains nulls, so many, that nothing replaces."""

    def leaves(self) -> Iterator[Leaf]:
        """Yield the columns of plain values that it consists of."""


@dataclass(frozen=True)
class Leaf:
    """A column of plain values."""

    path: str  # the names of a struct and its field are joined by a dot
    label: str  # for messages
    fill: pa.Scalar | None  # replaces nulls

    def convert(self, chunks: Sequence[pa.Array]) -> Values:
        raise NotImplementedError

    def check_nulls(self, count: int, label: str = "") -> None:
        if count and self.fill is None:
            raise ValueError(
                f"{label or self.label} has {_describe_nulls(count)}. Drop their rows, or say what "
                f"replaces them, as in fill={{{self.path!r}: {self._example()}}}."
            )

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def _example(self) -> str:
        return "0"

    def _filled(self, chunks: Sequence[pa.Array]) -> Sequence[pa.Array]:
        nulls = _count_nulls(chunks)
        self.check_nulls(nulls)
        if not nulls or self.fill is None:
            return chunks
        return [chunk.cast(self.fill.type, safe=False).fill_null(self.fill) for chunk in chunks]


@dataclass(frozen=True)
class Numbers(Leaf):
    """Values of a type that torch has, possibly after a conversion by Arrow."""

    types: tuple[pa.DataType, ...]  # that Arrow converts to, one after the other
    dtype: torch.dtype | None  # by default that of the last of `types`
    is_private: bool = False  # whether nothing else reads Arrow's memory

    def convert(self, chunks: Sequence[pa.Array]) -> torch.Tensor:
        chunks = self._filled([self._cast(_decoded(chunk)) for chunk in chunks])
        views = [_numpy_view(chunk) for chunk in chunks]
        if self.is_private and len(views) == 1 and views[0].flags.writeable:
            tensor = torch.from_numpy(views[0])
        else:
            tensor = torch.from_numpy(_joined(views, _numpy_dtype(self.types[-1])))
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
    """Strings or bytes, which remain a list."""

    is_binary: bool

    def convert(self, chunks: Sequence[pa.Array]) -> list[Any]:
        values: list[Any] = []
        for chunk in self._filled([_decoded(chunk) for chunk in chunks]):
            values += chunk.to_numpy(zero_copy_only=False).tolist()
        return values

    def _example(self) -> str:
        return "b''" if self.is_binary else "''"


def _describe_nulls(count: int) -> str:
    return f"{count:,} null{'s' * (count > 1)}"


def _count_nulls(chunks: Sequence[pa.Array]) -> int:
    return sum(chunk.null_count for chunk in chunks)


def _decoded(chunk: pa.Array) -> pa.Array:
    return chunk.dictionary_decode() if isinstance(chunk, pa.DictionaryArray) else chunk


def _numpy_view(array: pa.Array) -> NDArray[Any]:
    """Return numbers or booleans without nulls; numbers are not copied."""
    # Array.to_numpy does the same, but imports pandas, which takes longer than a rank's start.
    if pa.types.is_boolean(array.type):
        return _numpy_view(array.cast(pa.uint8())).view(np.bool_)
    dtype = _numpy_dtype(array.type)
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _numpy_dtype(kind: pa.DataType) -> np.dtype[Any]:
    return np.dtype({"halffloat": "float16", "float": "float32"}.get(str(kind), str(kind)))


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Copy arrays into one; without any, it is empty and has that dtype."""
    return np.concatenate(arrays or [np.empty(0, dtype)])


@dataclass(frozen=True)
class Vectors(Leaf):
    """Spark ML vectors, dense and sparse: structs of type, size, indices and values."""

    dtype: torch.dtype | None  # by default float64

    def convert(self, chunks: Sequence[pa.Array]) -> torch.Tensor:
        nulls = _count_nulls(chunks)
        self.check_nulls(nulls)
        parts = [_Vectors.of(chunk) for chunk in _without_nulls(chunks)]
        size = _common_length([part.sizes for part in parts], nulls, self.label)
        rows = torch.from_numpy(_joined([part.to_rows(size) for part in parts], float))
        rows = rows.reshape(-1, size) if size else rows.new_empty(len(rows), 0)
        rows = rows if self.dtype is None else rows.to(self.dtype)
        return _with_null_rows(rows, chunks, self.fill)


@dataclass(frozen=True)
class _Vectors:
    """The parts of a chunk of vectors without nulls."""

    is_dense: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    lengths: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, chunk: pa.StructArray) -> _Vectors:
        names = [field.name for field in chunk.type]
        part = dict(zip(names, chunk.flatten(), strict=True))
        is_dense = _numpy_view(part["type"]) == 1
        lengths = _lengths(part["values"])
        sizes = np.where(is_dense, lengths, _numpy_view(part["size"].fill_null(0)))
        indices = _numpy_view(part["indices"].flatten())
        values = _numpy_view(part["values"].flatten())
        return cls(is_dense, sizes, lengths, indices, values)

    def to_rows(self, size: int) -> NDArray[np.float64]:
        if self.is_dense.all():
            return self.values.reshape(len(self.sizes), size)
        rows = np.zeros((len(self.sizes), size))
        in_dense = np.repeat(self.is_dense, self.lengths)
        places = np.empty(len(self.values), np.int64)
        places[in_dense] = np.tile(np.arange(size), int(self.is_dense.sum()))
        places[~in_dense] = self.indices
        rows[np.repeat(np.arange(len(rows)), self.lengths), places] = self.values
        return rows


@dataclass(frozen=True)
class Arrays:
    """Arrays of equal or unequal lengths."""

    label: str
    item: Arrays | Numbers | Texts
    ragged: Ragged
    size: int | None  # of all arrays, if the type determines it
    is_inner: bool  # whether they are elements of arrays themselves

    @property
    def is_list(self) -> bool:
        return (
            (self.ragged == "list" and self.size is None)
            or isinstance(self.item, Texts)
            or (isinstance(self.item, Arrays) and self.item.is_list)
        )

    @property
    def is_nested(self) -> bool:
        """Whether the column becomes a nested tensor, of which only the second dimension varies."""
        varies = self.ragged == "nested" and self.size is None
        return varies and not self.is_inner and not self.is_list

    def convert(self, chunks: Sequence[pa.Array]) -> torch.Tensor | list[Any]:
        nulls = _count_nulls(chunks)
        self.check_nulls(nulls)
        valid = _without_nulls(chunks)
        lengths = [_lengths(chunk) for chunk in valid]
        items = self.item.convert([chunk.flatten() for chunk in valid])
        if not isinstance(items, torch.Tensor) or self.is_list:
            return _split(items, _joined(lengths, np.int64).tolist())
        if self.is_nested:
            offsets = np.cumsum(_joined([np.zeros(1, np.int64), *lengths], np.int64))
            return torch.nested.nested_tensor_from_jagged(items, torch.from_numpy(offsets))
        size = self.size
        if size is None:
            size = _common_length(lengths, nulls, self.label, self._advice())
        rows = items.reshape(sum(map(len, lengths)), size, *items.shape[1:])
        return _with_null_rows(rows, chunks, next(self.leaves()).fill)

    def check_nulls(self, count: int, label: str = "") -> None:
        label = label or self.label
        if count and (self.is_list or self.is_nested):
            raise ValueError(
                f"{label} has {_describe_nulls(count)} instead of arrays, which fill cannot "
                "replace because these arrays have no common length. Drop their rows, or replace "
                "the nulls by arrays before, as with Spark's coalesce."
            )
        self.item.check_nulls(count, label)

    def leaves(self) -> Iterator[Leaf]:
        yield from self.item.leaves()

    def _advice(self) -> str:
        advice = "ragged='list' for a list of tensors"
        if not self.is_inner:
            advice = f"ragged='nested' for a nested tensor, or {advice}"
        return f" Pass {advice}."


@dataclass(frozen=True)
class Struct:
    """A struct, which becomes a dict."""

    fields: Mapping[str, Column]

    def convert(self, chunks: Sequence[pa.Array]) -> dict[str, Any]:
        parts = [chunk.flatten() for chunk in chunks]  # the nulls of the struct are its fields'
        return {
            name: column.convert([part[index] for part in parts])
            for index, (name, column) in enumerate(self.fields.items())
        }

    def check_nulls(self, count: int) -> None:
        for column in self.fields.values():
            column.check_nulls(count)

    def leaves(self) -> Iterator[Leaf]:
        for column in self.fields.values():
            yield from column.leaves()


def _without_nulls(chunks: Sequence[pa.Array]) -> list[pa.Array]:
    return [chunk.drop_null() if chunk.null_count else chunk for chunk in chunks]


def _lengths(chunk: pa.Array) -> NDArray[np.int64]:
    if pa.types.is_fixed_size_list(chunk.type):
        return np.full(len(chunk), chunk.type.list_size)
    lengths: NDArray[np.int64] = np.diff(_numpy_view(chunk.offsets))
    return lengths


def _common_length(
    lengths: Sequence[NDArray[Any]], nulls: int, label: str, advice: str = ""
) -> int:
    """Return the length of all arrays or vectors that are not null; 0 if there are no rows."""
    found = [int(bound) for part in lengths if len(part) for bound in (part.min(), part.max())]
    if nulls and not found:
        raise ValueError(
            f"{label} is null in each of {nulls:,} rows that are converted at once, so that the "
            "length of what replaces the nulls is not known. Drop their rows."
        )
    if found and min(found) != max(found):
        raise ValueError(
            f"{label} has unequal lengths, from {min(found):,} to {max(found):,}.{advice}"
        )
    return found[0] if found else 0


def _with_null_rows(
    rows: torch.Tensor, chunks: Sequence[pa.Array], fill: pa.Scalar | None
) -> torch.Tensor:
    """Return the rows that are not null with those that are, which `fill` replaces."""
    if fill is None or not _count_nulls(chunks):
        return rows
    is_valid = [_numpy_view(chunk.is_valid()) for chunk in chunks]
    valid = torch.from_numpy(np.concatenate(is_valid))
    filled = rows.new_full((len(valid), *rows.shape[1:]), fill.as_py())
    filled[valid] = rows
    return filled


def _split(items: torch.Tensor | list[Any], lengths: list[int]) -> list[Any]:
    if isinstance(items, torch.Tensor):
        return list(torch.split(items, lengths)) if lengths else []
    return [items[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
