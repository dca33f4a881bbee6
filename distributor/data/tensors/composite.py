"""Columns whose values have parts: arrays, Spark ML vectors, and structs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from distributor.data.tensors.columns import (
    Column,
    Leaf,
    Numbers,
    Texts,
    count_nulls,
    describe_nulls,
    joined,
    numpy_view,
)
from distributor.data.tensors.options import Ragged

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Vectors(Leaf):
    """Spark ML vectors, dense and sparse: structs of type, size, indices and values.

    Parameters
    ----------
    dtype : torch.dtype or None
        The dtype of the tensor; None is float64.
    """

    dtype: torch.dtype | None

    def convert(self, chunks: Sequence[pa.Array]) -> torch.Tensor:
        nulls = count_nulls(chunks)
        self.check_nulls(nulls)
        parts = [_Vectors.of(chunk) for chunk in _without_nulls(chunks)]
        size = _common_length([part.sizes for part in parts], nulls, self.label)
        rows = torch.from_numpy(joined([part.to_rows(size) for part in parts], float))
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
        is_dense = numpy_view(part["type"]) == 1
        lengths = _lengths(part["values"])
        sizes = np.where(is_dense, lengths, numpy_view(part["size"].fill_null(0)))
        indices = numpy_view(part["indices"].flatten())
        values = numpy_view(part["values"].flatten())
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
    """Arrays of equal or unequal lengths.

    Parameters
    ----------
    label : str
        What messages call the column.
    item : Arrays or Leaf
        The column of the arrays' elements.
    ragged : "error", "nested" or "list"
        What arrays become whose lengths may differ.
    size : int or None
        The length of all arrays, if the type determines it.
    is_inner : bool
        Whether they are elements of arrays themselves.
    """

    label: str
    item: Arrays | Numbers | Texts
    ragged: Ragged
    size: int | None
    is_inner: bool

    @property
    def is_list(self) -> bool:
        """Whether the column becomes a list."""
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
        nulls = count_nulls(chunks)
        self.check_nulls(nulls)
        valid = _without_nulls(chunks)
        lengths = [_lengths(chunk) for chunk in valid]
        items = self.item.convert([chunk.flatten() for chunk in valid])
        if not isinstance(items, torch.Tensor) or self.is_list:
            return _split(items, joined(lengths, np.int64).tolist())
        if self.is_nested:
            offsets = np.cumsum(joined([np.zeros(1, np.int64), *lengths], np.int64))
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
                f"{label} has {describe_nulls(count)} instead of arrays, which fill cannot replace "
                "because these arrays have no common length. Drop their rows, or replace the nulls "
                "by arrays before, as with Spark's coalesce."
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
    """A struct, which becomes a dict.

    Parameters
    ----------
    fields : mapping of str to Column
        The column of each field.
    """

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
    """Return the length of each array of a chunk without nulls."""
    if pa.types.is_fixed_size_list(chunk.type):
        return np.full(len(chunk), chunk.type.list_size)
    lengths: NDArray[np.int64] = np.diff(numpy_view(chunk.offsets))
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
    if fill is None or not count_nulls(chunks):
        return rows
    is_valid = [numpy_view(chunk.is_valid()) for chunk in chunks]
    valid = torch.from_numpy(np.concatenate(is_valid))
    filled = rows.new_full((len(valid), *rows.shape[1:]), fill.as_py())
    filled[valid] = rows
    return filled


def _split(items: torch.Tensor | list[Any], lengths: list[int]) -> list[Any]:
    if isinstance(items, torch.Tensor):
        return list(torch.split(items, lengths)) if lengths else []
    return [items[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
