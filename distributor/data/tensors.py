"""Tables of Arrow become dicts of tensors, by the types that docs/how-to/dataframes.md lists."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import torch

from distributor.data.batches import Format
from distributor.data.columns import Arrays, Column, Leaf, Numbers, Ragged, Struct, Texts, Vectors

Change: TypeAlias = Callable[[Any], Any]  # makes another object of a table, a batch or a row

_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
ROWS_AT_ONCE = 1024  # rows that are converted at once to be yielded one by one


def tensor_format(
    options: TensorOptions, change: Change | None = None, finish: Change | None = None
) -> Format:
    """Return the format of dicts of tensors; `change` changes each batch, `finish` many at once."""
    convert = chained(partial(to_tensors, options=options), finish)
    if options.has_nested:
        return Format(chained(convert, change))
    max_rows = ROWS_AT_ONCE if options.vectors else None  # sparse vectors become dense
    return Format(convert, partial(_cut_batch, change), max_rows)


def collated_format(
    collate_fn: Change, vectors: frozenset[str], finish: Change | None = None
) -> Format:
    """Return the format of what `collate_fn` makes of NumPy arrays, or of what its class says."""
    kinds = {"ArrowBatchCollateFn": "pyarrow", "PandasBatchCollateFn": "pandas"}
    named = [kinds[base.__name__] for base in type(collate_fn).__mro__ if base.__name__ in kinds]
    plain = table_format(named[0] if named else "numpy", vectors)
    return Format(chained(plain.convert, chained(collate_fn, finish)))


def table_format(batch_format: str | None, vectors: frozenset[str]) -> Format:
    if batch_format == "pandas":
        return Format(partial(_to_pandas, vectors=vectors))
    if batch_format in ("numpy", "default"):
        return Format(partial(_to_numpy, vectors=vectors))
    return Format(_same)


def chained(first: Change, second: Change | None) -> Change:
    return first if second is None else partial(_call_both, first, second)


def row_format(vectors: frozenset[str]) -> Format:
    return Format(partial(_to_rows, vectors=vectors), _cut_row, ROWS_AT_ONCE)


def item_format(options: TensorOptions, change: Change | None) -> Format:
    return Format(partial(items, options=options, change=change), _cut_row, ROWS_AT_ONCE)


def items(table: pa.Table, options: TensorOptions, change: Change | None = None) -> list[Any]:
    """Convert a table to a list of its rows, without the dimension of the batch."""
    rows = _rows(to_tensors(table, options), table.num_rows)
    return rows if change is None else [change(row) for row in rows]


def _rows(columns: dict[str, Any], count: int) -> list[dict[str, Any]]:
    values = []
    for column in columns.values():
        if isinstance(column, torch.Tensor):
            column = column.unbind(0)
        elif isinstance(column, dict):
            column = _rows(column, count)
        values.append(column)
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _same(table: pa.Table) -> pa.Table:
    return table


def _call_both(first: Change, second: Change, value: Any) -> Any:
    return second(first(value))


def _cut_batch(change: Change | None, batch: Any, start: int, stop: int) -> Any:
    part = _cut(batch, start, stop)
    return part if change is None else change(part)


def _cut_row(rows: list[Any], start: int, _: int) -> Any:
    return rows[start]


def _cut(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, dict):
        return {name: _cut(column, start, stop) for name, column in batch.items()}
    return batch[start:stop]


def _to_rows(table: pa.Table, vectors: frozenset[str]) -> list[dict[str, Any]]:
    dense = {name: list(_dense(table, name)) for name in table.column_names if name in vectors}
    return [
        row | {name: values[at] for name, values in dense.items()}
        for at, row in enumerate(table.to_pylist())
    ]


def _to_numpy(table: pa.Table, vectors: frozenset[str]) -> dict[str, Any]:
    return {
        name: _dense(table, name) if name in vectors else _array(table[name])
        for name in table.column_names
    }


def _to_pandas(table: pa.Table, vectors: frozenset[str]) -> Any:
    frame = table.to_pandas()
    for name in vectors.intersection(table.column_names):
        frame[name] = list(_dense(table, name))
    return frame


def _dense(table: pa.Table, name: str) -> Any:
    options = TensorOptions(vectors=frozenset([name]))
    return to_tensors(table.select([name]), options)[name].numpy()


def _array(column: pa.ChunkedArray) -> Any:
    """Convert a column to a writable array; lists of equal length have two dimensions."""
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # of some versions of pyarrow
        values = pa.concat_arrays(values.chunks)
    kind = values.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_list = is_list or pa.types.is_fixed_size_list(kind)
    if is_list and any(is_kind(kind.value_type) for is_kind in _NUMBERS):
        flat = values.flatten()
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        if not values.null_count and len(lengths) == 1 and not flat.null_count:
            return _writable(flat.to_numpy(zero_copy_only=False)).reshape(len(values), -1)
    return _writable(values.to_numpy(zero_copy_only=False))


def _writable(array: Any) -> Any:
    # Arrow's memory must not be changed, because other ranks may read it.
    return array if array.flags.writeable else array.copy()


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
