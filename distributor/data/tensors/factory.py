"""Which class converts a column of which type, with which options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa

from distributor.data.tensors.columns import Column, Leaf, Numbers, Texts
from distributor.data.tensors.composite import Arrays, Struct, Vectors
from distributor.data.tensors.options import TensorOptions

_VECTOR_FIELDS = ["type", "size", "indices", "values"]


def leaves_of(columns: Mapping[str, Column]) -> Iterator[Leaf]:
    """Yield the columns of plain values that columns consist of."""
    for column in columns.values():
        yield from column.leaves()


def make_columns(schema: pa.Schema, options: TensorOptions, dataset: str) -> dict[str, Column]:
    """Return what converts each column, after all checks that need no rows."""
    factory = _Factory(options, dataset)
    columns = factory.columns(schema, "")
    known = [leaf.path for leaf in leaves_of(columns)]
    for option in ("dtypes", "fill", "ragged"):
        value = getattr(options, option)
        unknown = sorted(value.keys() - set(known)) if isinstance(value, Mapping) else []
        if unknown:
            raise ValueError(
                f"{option} names {', '.join(map(repr, unknown))}, but the columns"
                f"{factory.of_dataset} are {', '.join(map(repr, known))}."
            )
    return columns


@dataclass(frozen=True)
class _Factory:
    """Makes what converts a column, from its type."""

    options: TensorOptions
    dataset: str

    @property
    def of_dataset(self) -> str:
        return f" of {self.dataset}" if self.dataset else ""

    def columns(self, fields: Any, prefix: str) -> dict[str, Column]:
        found: dict[str, Column] = {}
        for field in fields:
            path = prefix + field.name
            label = f"Column {path!r}{self.of_dataset}"
            if field.name in found:
                raise ValueError(f"{label} exists twice. Rename one of the two.")
            found[field.name] = self._column(field.type, path, label)
        return found

    def _column(self, kind: pa.DataType, path: str, label: str) -> Column:
        if _is_array(kind):
            return self._arrays(kind, path, label)
        if isinstance(self.options.ragged, Mapping) and path in self.options.ragged:
            raise ValueError(f"{label} has the type {kind}, to which ragged does not apply.")
        if path in self.options.vectors:
            return self._vectors(kind, path, label)
        if pa.types.is_struct(kind):
            return Struct(self.columns(kind, f"{path}."))
        return self._leaf(kind, path, label)

    def _arrays(self, kind: pa.DataType, path: str, label: str, is_inner: bool = False) -> Arrays:
        item = kind.value_type
        inside = label if is_inner else f"{label} (inside its arrays)"
        column = (
            self._arrays(item, path, inside, is_inner=True)
            if _is_array(item)
            else self._leaf(item, path, inside)
        )
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        return Arrays(label, column, self.options.ragged_of(path), size, is_inner)

    def _vectors(self, kind: pa.DataType, path: str, label: str) -> Vectors:
        if not pa.types.is_struct(kind) or [field.name for field in kind] != _VECTOR_FIELDS:
            raise TypeError(f"{label} has the type {kind}, which is not that of Spark ML vectors.")
        fill = self._fill(path, label, pa.float64(), (pa.float64(),))
        return Vectors(path, label, fill, self.options.dtype_of(path))

    def _leaf(self, kind: pa.DataType, path: str, label: str) -> Numbers | Texts:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if _is_string(kind) or _is_binary(kind):
            if isinstance(self.options.dtypes, Mapping) and path in self.options.dtypes:
                raise ValueError(
                    f"{label} has the type {kind}, which remains a list without a dtype. Leave it "
                    "out of dtypes."
                )
            fill = self._fill(path, label, kind, (kind,))
            return Texts(path, label, fill, _is_binary(kind))
        types = _arrow_types(kind)
        if not types:
            hint = " Select its fields as arrays of their own." if pa.types.is_struct(kind) else ""
            raise TypeError(
                f"{label} has the type {kind}, which has no tensor.{hint} Leave it out, as with "
                "df.drop or df.select, or read the rows with iter_batches."
            )
        fill = self._fill(path, label, kind, types)
        return Numbers(path, label, fill, types, self.options.dtype_of(path))

    def _fill(
        self, path: str, label: str, kind: pa.DataType, types: tuple[pa.DataType, ...]
    ) -> pa.Scalar | None:
        """Return what replaces nulls, in the type that the column is converted to."""
        fill = self.options.fill
        is_number = _is_number(kind)
        if isinstance(fill, Mapping):
            if path not in fill:
                return None
            fill = fill[path]
        elif fill is None or not is_number:
            return None
        dtype = self.options.dtype_of(path)
        found = _scalar(fill, types)
        if found is None and is_number and dtype is not None and dtype.is_floating_point:
            found = _scalar(fill, (pa.float64(),))  # as with NaN in a column of integers
        if found is None:
            raise ValueError(f"{label} has the type {kind}, which fill={fill!r} does not fit.")
        return found


def _is_array(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _arrow_types(kind: pa.DataType) -> tuple[pa.DataType, ...]:
    """Return the types through which Arrow converts numbers; none if torch has no such type."""
    types = pa.types
    if types.is_decimal(kind):
        return (pa.float64(),)
    if types.is_date(kind):
        return (pa.date32(), pa.int32())
    if types.is_timestamp(kind):
        return (pa.timestamp("us", kind.tz), pa.int64())
    if types.is_time(kind):
        return (pa.time64("us"), pa.int64())
    if types.is_duration(kind):
        return (pa.duration("us"), pa.int64())
    if types.is_uint16(kind):
        return (pa.int32(),)
    if types.is_uint32(kind) or types.is_uint64(kind):
        return (pa.int64(),)
    return (kind,) if _is_number(kind) or types.is_boolean(kind) else ()


def _scalar(value: Any, types: tuple[pa.DataType, ...]) -> pa.Scalar | None:
    """Convert a value; return None if it does not fit."""
    if isinstance(value, Decimal) and pa.types.is_floating(types[0]):
        value = float(value)
    try:
        scalar = pa.scalar(value, types[0])
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        return None
    is_truncated = pa.types.is_integer(types[0]) and scalar.as_py() != value
    return scalar.cast(types[-1]) if scalar.is_valid and not is_truncated else None
