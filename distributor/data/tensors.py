"""Tables of Arrow become dicts of tensors, by the types that docs/how-to/dataframes.md lists."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, get_args

import pyarrow as pa
import torch

from distributor.data.columns import Arrays, Column, Leaf, Numbers, Ragged, Struct, Texts, Vectors

_VECTOR_FIELDS = ["type", "size", "indices", "values"]


@dataclass(frozen=True)
class TensorOptions:
    """How columns become tensors. A field of a struct is named as in ``"address.zip"``."""

    dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None
    # Replaces nulls: of all columns of numbers, or of each column. It also replaces the elements of
    # an array or vector that is null, if all others have the same length.
    fill: Any = None
    # With "nested", only the outermost of nested arrays may differ in length; with "list", nested
    # arrays become lists of lists of tensors.
    ragged: Ragged | Mapping[str, Ragged] = "error"
    vectors: frozenset[str] = frozenset()  # the columns of Spark ML vectors, as structs
    # Columns whose memory nothing else reads, so that their tensors may use it. Fields of structs
    # are copied nevertheless.
    private: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for dtype in _values(self.dtypes):
            if not isinstance(dtype, torch.dtype | None):
                raise TypeError(
                    "dtypes must be a torch.dtype, or a mapping of columns' names to these, but is "
                    f"or contains {dtype!r}."
                )
        for ragged in _values(self.ragged):
            if ragged not in get_args(Ragged):
                raise ValueError(
                    "ragged must be 'error', 'nested' or 'list', or a mapping of columns' names to "
                    f"these, but is or contains {ragged!r}."
                )
        if not isinstance(self.fill, numbers.Number | Mapping | None):
            raise TypeError(
                "fill must be a number, which replaces nulls in all columns of numbers, or a "
                f"mapping of columns' names to values, but is {self.fill!r}."
            )

    @property
    def has_nested(self) -> bool:
        """Whether columns may become nested tensors, whose rows cannot be sliced."""
        return "nested" in _values(self.ragged)

    def dtype_of(self, path: str) -> torch.dtype | None:
        return self.dtypes.get(path) if isinstance(self.dtypes, Mapping) else self.dtypes

    def ragged_of(self, path: str) -> Ragged:
        return self.ragged.get(path, "error") if isinstance(self.ragged, Mapping) else self.ragged


def _values(option: Any) -> list[Any]:
    return list(option.values()) if isinstance(option, Mapping) else [option]


def _leaves_of(columns: Mapping[str, Column]) -> Iterator[Leaf]:
    for column in columns.values():
        yield from column.leaves()


def _make_columns(schema: pa.Schema, options: TensorOptions, dataset: str) -> dict[str, Column]:
    """Return what converts each column, after all checks that need no rows."""
    factory = _Factory(options, dataset)
    columns = factory.columns(schema, "")
    known = [leaf.path for leaf in _leaves_of(columns)]
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
        is_binary = _is(kind, "binary", "large_binary", "fixed_size_binary")
        if is_binary or _is(kind, "string", "large_string"):
            if isinstance(self.options.dtypes, Mapping) and path in self.options.dtypes:
                raise ValueError(
                    f"{label} has the type {kind}, which remains a list without a dtype. Leave it "
                    "out of dtypes."
                )
            fill = self._fill(path, label, kind, (kind,))
            return Texts(path, label, fill, is_binary)
        types = _arrow_types(kind)
        if not types:
            hint = " Select its fields as arrays of their own." if pa.types.is_struct(kind) else ""
            raise TypeError(
                f"{label} has the type {kind}, which has no tensor.{hint} Leave it out, as with "
                "df.drop or df.select, or read the rows with iter_batches."
            )
        fill = self._fill(path, label, kind, types)
        is_private = "." not in path and path in self.options.private
        return Numbers(path, label, fill, types, self.options.dtype_of(path), is_private)

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


def _is(kind: pa.DataType, *names: str) -> bool:
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def _is_array(kind: pa.DataType) -> bool:
    return _is(kind, "list", "large_list", "fixed_size_list")


def _is_number(kind: pa.DataType) -> bool:
    return _is(kind, "integer", "floating", "decimal")


def _arrow_types(kind: pa.DataType) -> tuple[pa.DataType, ...]:
    """Return the types through which Arrow converts numbers; none if torch has no such type."""
    if _is(kind, "decimal"):
        return (pa.float64(),)
    if _is(kind, "date"):
        return (pa.date32(), pa.int32())
    if _is(kind, "timestamp"):
        return (pa.timestamp("us", kind.tz), pa.int64())
    if _is(kind, "time"):
        return (pa.time64("us"), pa.int64())
    if _is(kind, "duration"):
        return (pa.duration("us"), pa.int64())
    if _is(kind, "uint16"):
        return (pa.int32(),)
    if _is(kind, "uint32", "uint64"):
        return (pa.int64(),)
    return (kind,) if _is_number(kind) or _is(kind, "boolean") else ()


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


def to_tensors(table: pa.Table, options: TensorOptions) -> dict[str, Any]:
    """Convert a table's columns to tensors, which own their memory unless it is `private`."""
    columns = _make_columns(table.schema, options, "")
    return {
        name: column.convert(table.column(index).chunks)
        for index, (name, column) in enumerate(columns.items())
    }


def check_columns(
    schema: pa.Schema, options: TensorOptions, null_counts: Mapping[str, int] | None, name: str
) -> None:
    """Check, before the first batch, that a dataset's columns can become tensors."""
    columns = _make_columns(schema, options, name)
    known: dict[str, Column] = {leaf.path: leaf for leaf in _leaves_of(columns)} | columns
    for path, count in (null_counts or {}).items():
        if path in known:
            known[path].check_nulls(count)
