"""Tables of Arrow become dicts of tensors, by the types that docs/how-to/dataframes.md lists.

There is a class for each kind of column. A column is converted from its chunks. Numbers are copied
once, without a Python object for each row. They must be copied, because Arrow's memory may be a
read-only map that other ranks share; except those of columns whose memory nothing else reads.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from distributor.data.batches import Format, whole
from distributor.rank.context import pin

if TYPE_CHECKING:
    from numpy.typing import NDArray

Change: TypeAlias = Callable[[Any], Any]  # makes another object of a table, a batch or a row
Column: TypeAlias = "Numbers | Texts | Vectors | Arrays | Struct"  # converts the columns of a type
# What arrays become whose lengths may differ.
RaggedKind: TypeAlias = Literal["error", "nested", "list"]
Dtypes: TypeAlias = "torch.dtype | Mapping[str, torch.dtype] | None"
Ragged: TypeAlias = "RaggedKind | Mapping[str, RaggedKind]"

VECTOR_FIELDS = ["type", "size", "indices", "values"]  # of Spark ML's vectors
ROWS_AT_ONCE = 1024  # rows that are converted at once to be yielded one by one


def tensor_format(options: TensorOptions, change: Change | None = None) -> Format:
    """Return the format of dicts of tensors."""
    cut = None if "nested" in _values(options.ragged) else _cut  # rows of nested tensors are fixed
    max_rows = ROWS_AT_ONCE if options.vectors else None  # sparse vectors become dense
    return Format(partial(to_tensors, options=options), cut, max_rows, change)


def collated_format(collate_fn: Change, vectors: frozenset[str]) -> Format:
    """Return the format of what `collate_fn` makes of NumPy arrays, or of what its class says."""
    kinds = {"ArrowBatchCollateFn": "pyarrow", "PandasBatchCollateFn": "pandas"}
    named = [kinds[base.__name__] for base in type(collate_fn).__mro__ if base.__name__ in kinds]
    plain = table_format(named[0] if named else "numpy", vectors)
    return Format(partial(_call_both, plain.convert, collate_fn))


def pinned(form: Format) -> Format:
    """Return a format whose batches are in pinned memory."""
    return replace(form, convert=partial(_call_both, form.convert, pin))


def table_format(batch_format: str | None, vectors: frozenset[str]) -> Format:
    if batch_format not in list(_TABLE_FORMATS):  # a list, because it may not be hashable
        listed = ", ".join(map(repr, _TABLE_FORMATS))
        raise ValueError(f"batch_format must be one of {listed}, but is {batch_format!r}.")
    return Format(partial(_TABLE_FORMATS[batch_format], vectors=vectors))


def row_format(vectors: frozenset[str]) -> Format:
    return Format(partial(_to_rows, vectors=vectors), _cut_row, ROWS_AT_ONCE)


def item_format(options: TensorOptions, change: Change | None) -> Format:
    return Format(partial(items, options=options), _cut_row, ROWS_AT_ONCE, change)


def items(table: pa.Table, options: TensorOptions) -> list[Any]:
    """Convert a table to a list of its rows, without the dimension of the batch."""
    return _rows(to_tensors(table, options))


def _rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    values = []
    for column in columns.values():
        if isinstance(column, torch.Tensor):
            column = column.unbind(0)
        elif isinstance(column, dict):
            column = _rows(column)
        values.append(column)
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _call_both(first: Change, second: Change, value: Any) -> Any:
    return second(first(value))


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


def _to_table(table: pa.Table, vectors: frozenset[str]) -> pa.Table:
    return table


_TABLE_FORMATS: dict[str | None, Callable[..., Any]] = {
    "default": _to_numpy,
    "numpy": _to_numpy,
    "pandas": _to_pandas,
    "pyarrow": _to_table,
    None: _to_table,
}


def _dense(table: pa.Table, name: str) -> Any:
    options = TensorOptions(vectors=frozenset([name]))
    return to_tensors(table.select([name]), options)[name].numpy()


def _array(column: pa.ChunkedArray) -> Any:
    """Convert a column to a writable array; lists of equal length have two dimensions."""
    values = whole(column)
    kind = values.type
    if is_array(kind) and is_any(kind.value_type, "integer", "floating", "boolean"):
        flat = values.flatten()
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        if not values.null_count and len(lengths) == 1 and not flat.null_count:
            return _writable(flat.to_numpy(zero_copy_only=False)).reshape(len(values), -1)
    return _writable(values.to_numpy(zero_copy_only=False))


def _writable(array: Any) -> Any:
    # Arrow's memory must not be changed, because other ranks may read it.
    return array if array.flags.writeable else array.copy()


@dataclass(frozen=True)
class TensorOptions:
    """How columns become tensors. A field of a struct is named as in ``"address.zip"``."""

    dtypes: Dtypes = None
    # Replaces nulls: of all columns of numbers, or of each column. It also replaces the elements of
    # an array or vector that is null, if all others have the same length.
    fill: Any = None
    # With "nested", only the outermost of nested arrays may differ in length; with "list", nested
    # arrays become lists of lists of tensors.
    ragged: Ragged = "error"
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
            if ragged not in get_args(RaggedKind):
                raise ValueError(
                    "ragged must be 'error', 'nested' or 'list', or a mapping of columns' names to "
                    f"these, but is or contains {ragged!r}."
                )
        if not isinstance(self.fill, numbers.Number | Mapping | None):
            raise TypeError(
                "fill must be a number, which replaces nulls in all columns of numbers, or a "
                f"mapping of columns' names to values, but is {self.fill!r}."
            )

    def dtype_of(self, path: str) -> torch.dtype | None:
        return self.dtypes.get(path) if isinstance(self.dtypes, Mapping) else self.dtypes

    def ragged_of(self, path: str) -> RaggedKind:
        return self.ragged.get(path, "error") if isinstance(self.ragged, Mapping) else self.ragged


def _values(option: Any) -> list[Any]:
    return list(option.values()) if isinstance(option, Mapping) else [option]


def to_tensors(table: pa.Table, options: TensorOptions) -> dict[str, Any]:
    """Convert a table's columns to tensors, which own their memory unless it is `private`."""
    return _columns_of(table.schema, options, "").convert_parts(table.columns)


def check_columns(
    schema: pa.Schema, options: TensorOptions, null_counts: Mapping[str, int] | None, name: str
) -> None:
    """Check, before the first batch, that a dataset's columns can become tensors."""
    columns = _columns_of(schema, options, name)
    for column, count in (null_counts or {}).items():
        columns.fields[column].check_nulls(count)


def _columns_of(schema: pa.Schema, options: TensorOptions, dataset: str) -> Struct:
    """Return what converts each column, after all checks that need no rows."""
    of_dataset = f" of {dataset}" if dataset else ""
    columns = _Factory(options, of_dataset).struct(schema, "")
    known = [leaf.path for leaf in columns.leaves()]
    for option in ("dtypes", "fill", "ragged"):
        value = getattr(options, option)
        unknown = sorted(value.keys() - set(known)) if isinstance(value, Mapping) else []
        if unknown:
            raise ValueError(
                f"{option} names {', '.join(map(repr, unknown))}, but the columns{of_dataset} are "
                f"{', '.join(map(repr, known))}."
            )
    return columns


@dataclass(frozen=True)
class _Factory:
    """Makes what converts a column, from its type."""

    options: TensorOptions
    of_dataset: str

    def struct(self, fields: Any, prefix: str) -> Struct:
        found: dict[str, Column] = {}
        for field in fields:
            path = prefix + field.name
            label = f"Column {path!r}{self.of_dataset}"
            if field.name in found:
                raise ValueError(f"{label} exists twice. Rename one of the two.")
            found[field.name] = self._column(field.type, path, label)
        return Struct(found)

    def _column(self, kind: pa.DataType, path: str, label: str) -> Column:
        if is_array(kind):
            return self._arrays(kind, path, label)
        if isinstance(self.options.ragged, Mapping) and path in self.options.ragged:
            raise ValueError(f"{label} has the type {kind}, to which ragged does not apply.")
        if path in self.options.vectors:
            if not pa.types.is_struct(kind) or [field.name for field in kind] != VECTOR_FIELDS:
                raise TypeError(
                    f"{label} has the type {kind}, which is not that of Spark ML vectors."
                )
            fill = self._fill(path, label, pa.float64(), (pa.float64(),))
            return Vectors(path, label, fill, "0", self.options.dtype_of(path))
        if pa.types.is_struct(kind):
            return self.struct(kind, f"{path}.")
        return self._leaf(kind, path, label)

    def _arrays(self, kind: pa.DataType, path: str, label: str, is_inner: bool = False) -> Arrays:
        item = kind.value_type
        inside = label if is_inner else f"{label} (inside its arrays)"
        column = (
            self._arrays(item, path, inside, is_inner=True)
            if is_array(item)
            else self._leaf(item, path, inside)
        )
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        form: RaggedKind = "error" if size is not None else self.options.ragged_of(path)
        if isinstance(column, Texts) or (isinstance(column, Arrays) and column.form == "list"):
            form = "list"
        elif is_inner and form == "nested":  # only the second dimension of a nested tensor varies
            form = "error"
        return Arrays(label, column, form, size, is_inner)

    def _leaf(self, kind: pa.DataType, path: str, label: str) -> Numbers | Texts:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        is_binary = is_any(kind, "binary", "large_binary", "fixed_size_binary")
        if is_binary or is_any(kind, "string", "large_string"):
            if isinstance(self.options.dtypes, Mapping) and path in self.options.dtypes:
                raise ValueError(
                    f"{label} has the type {kind}, which remains a list without a dtype. Leave it "
                    "out of dtypes."
                )
            fill = self._fill(path, label, kind, (kind,))
            return Texts(path, label, fill, "b''" if is_binary else "''")
        types = _arrow_types(kind)
        if not types:
            hint = " Select its fields as arrays of their own." if pa.types.is_struct(kind) else ""
            raise TypeError(
                f"{label} has the type {kind}, which has no tensor.{hint} Leave it out, as with "
                "df.drop or df.select, or read the rows with iter_batches."
            )
        fill = self._fill(path, label, kind, types)
        is_private = "." not in path and path in self.options.private
        example = "False" if pa.types.is_boolean(kind) else "0"
        return Numbers(path, label, fill, example, types, self.options.dtype_of(path), is_private)

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


def is_any(kind: pa.DataType, *names: str) -> bool:
    """Return whether one of pyarrow's predicates of these names is true of a type."""
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def is_array(kind: pa.DataType) -> bool:
    return is_any(kind, "list", "large_list", "fixed_size_list")


def _is_number(kind: pa.DataType) -> bool:
    return is_any(kind, "integer", "floating", "decimal")


# By the names of pyarrow's predicates, the types through which Arrow converts numbers.
_CONVERSIONS = {
    "decimal": (pa.float64(),),
    "date": (pa.date32(), pa.int32()),
    "time": (pa.time64("us"), pa.int64()),
    "duration": (pa.duration("us"), pa.int64()),
    "uint16": (pa.int32(),),
    "uint32": (pa.int64(),),
    "uint64": (pa.int64(),),
}


def _arrow_types(kind: pa.DataType) -> tuple[pa.DataType, ...]:
    """Return the types through which Arrow converts numbers; none if torch has no such type."""
    if pa.types.is_timestamp(kind):
        return (pa.timestamp("us", kind.tz), pa.int64())
    converted = (types for name, types in _CONVERSIONS.items() if is_any(kind, name))
    plain = (kind,) if _is_number(kind) or pa.types.is_boolean(kind) else ()
    return next(converted, plain)


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


@dataclass(frozen=True)
class Leaf:
    """A column of plain values."""

    path: str  # the names of a struct and its field are joined by a dot
    label: str  # for messages
    fill: pa.Scalar | None  # replaces nulls
    example: str  # of `fill`, for messages

    def check_nulls(self, count: int, label: str = "") -> None:
        """Raise a ValueError if the column contains nulls, so many, that nothing replaces."""
        if count and self.fill is None:
            raise ValueError(
                f"{label or self.label} has {_describe_nulls(count)}. Drop their rows, or say what "
                f"replaces them, as in fill={{{self.path!r}: {self.example}}}."
            )

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def _filled(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        self.check_nulls(column.null_count)
        if not column.null_count or self.fill is None:
            return column
        return column.cast(self.fill.type, safe=False).fill_null(self.fill)


@dataclass(frozen=True)
class Numbers(Leaf):
    """Values of a type that torch has, possibly after a conversion by Arrow."""

    types: tuple[pa.DataType, ...]  # that Arrow converts to, one after the other
    dtype: torch.dtype | None  # by default that of the last of `types`
    is_private: bool = False  # whether nothing else reads Arrow's memory

    def convert(self, column: pa.ChunkedArray) -> torch.Tensor:
        column = self._filled(self._cast(_decoded(column)))
        if self.is_private and column.num_chunks == 1:
            values = _numpy_view(column.chunk(0))
            values = values if values.flags.writeable else values.copy()
        else:
            values = _numpy_copy(column)
        tensor = torch.from_numpy(values)
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def _cast(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        safe = getattr(column.type, "unit", None) != "ns"  # nanoseconds are truncated
        try:
            for kind in self.types:
                column = column if column.type == kind else column.cast(kind, safe=safe)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{self.label} has a value that does not fit {self.types[-1]}: {error}"
            ) from None
        return column


@dataclass(frozen=True)
class Texts(Leaf):
    """Strings or bytes, which remain a list."""

    def convert(self, column: pa.ChunkedArray) -> list[Any]:
        values: list[Any] = self._filled(_decoded(column)).to_numpy().tolist()
        return values


@dataclass(frozen=True)
class Vectors(Leaf):
    """Spark ML vectors, dense and sparse: structs of type, size, indices and values."""

    dtype: torch.dtype | None  # by default float64

    def convert(self, column: pa.ChunkedArray) -> torch.Tensor:
        self.check_nulls(column.null_count)
        kinds, sizes, indices, values = column.drop_null().flatten()
        is_dense = _numpy_copy(kinds) == 1
        lengths = _numpy_copy(pc.list_value_length(values))
        sizes = np.where(is_dense, lengths, _numpy_copy(sizes.fill_null(0)))
        size = _common_length(sizes, column.null_count, self.label)
        values = _numpy_copy(pc.list_flatten(values))
        if is_dense.all():
            rows = values.reshape(len(sizes), size)
        else:
            rows = np.zeros((len(sizes), size))
            in_dense = np.repeat(is_dense, lengths)
            places = np.empty(len(values), np.int64)
            places[in_dense] = np.tile(np.arange(size), int(is_dense.sum()))
            places[~in_dense] = _numpy_copy(pc.list_flatten(indices))
            rows[np.repeat(np.arange(len(rows)), lengths), places] = values
        tensor = torch.from_numpy(rows)
        tensor = tensor if self.dtype is None else tensor.to(self.dtype)
        return _with_null_rows(tensor, column, self.fill)


@dataclass(frozen=True)
class Arrays:
    """Arrays of equal or unequal lengths."""

    label: str
    item: Arrays | Numbers | Texts
    form: RaggedKind
    size: int | None  # of all arrays, if the type determines it
    is_inner: bool  # whether they are elements of arrays themselves

    def convert(self, column: pa.ChunkedArray) -> torch.Tensor | list[Any]:
        nulls = column.null_count
        self.check_nulls(nulls)
        valid = column.drop_null()
        lengths = _numpy_copy(pc.list_value_length(valid))
        items = self.item.convert(pc.list_flatten(valid))
        if not isinstance(items, torch.Tensor) or self.form == "list":
            return _split(items, lengths.tolist())
        if self.form == "nested":
            offsets = np.cumsum(np.concatenate([[0], lengths]), dtype=np.int64)
            return torch.nested.nested_tensor_from_jagged(items, torch.from_numpy(offsets))
        size = self.size
        if size is None:
            size = _common_length(lengths, nulls, self.label, self._advice())
        rows = items.reshape(len(valid), size, *items.shape[1:])
        return _with_null_rows(rows, column, next(self.leaves()).fill)

    def check_nulls(self, count: int, label: str = "") -> None:
        label = label or self.label
        if count and self.form != "error":
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
    """A struct, which becomes a dict; or all columns of a table."""

    fields: Mapping[str, Column]

    def convert(self, column: pa.ChunkedArray) -> dict[str, Any]:
        return self.convert_parts(column.flatten())  # the nulls of the struct are its fields'

    def convert_parts(self, parts: Sequence[pa.ChunkedArray]) -> dict[str, Any]:
        pairs = zip(self.fields.items(), parts, strict=True)
        return {name: column.convert(part) for (name, column), part in pairs}

    def check_nulls(self, count: int) -> None:
        for column in self.fields.values():
            column.check_nulls(count)

    def leaves(self) -> Iterator[Leaf]:
        for column in self.fields.values():
            yield from column.leaves()


def _describe_nulls(count: int) -> str:
    return f"{count:,} null{'s' * (count > 1)}"


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if is_any(column.type, "dictionary") else column


def _numpy_copy(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return numbers or booleans without nulls as one array."""
    return np.concatenate(
        [np.empty(0, _numpy_dtype(column.type)), *map(_numpy_view, column.chunks)]
    )


def _numpy_view(array: pa.Array) -> NDArray[Any]:
    """Return numbers or booleans without nulls; numbers are not copied."""
    # Array.to_numpy does the same, but imports pandas, which takes longer than a rank's start.
    if pa.types.is_boolean(array.type):
        return _numpy_view(array.cast(pa.uint8())).view(np.bool_)
    dtype = _numpy_dtype(array.type)
    if not len(array):  # perhaps without a buffer
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _numpy_dtype(kind: pa.DataType) -> np.dtype[Any]:
    return np.dtype({"halffloat": "float16", "float": "float32"}.get(str(kind), str(kind)))


def _common_length(lengths: NDArray[Any], nulls: int, label: str, advice: str = "") -> int:
    """Return the length of all arrays or vectors that are not null; 0 if there are no rows."""
    if nulls and not len(lengths):
        raise ValueError(
            f"{label} is null in each of {nulls:,} rows that are converted at once, so that the "
            "length of what replaces the nulls is not known. Drop their rows."
        )
    least, most = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if least != most:
        raise ValueError(f"{label} has unequal lengths, from {least:,} to {most:,}.{advice}")
    return least


def _with_null_rows(
    rows: torch.Tensor, column: pa.ChunkedArray, fill: pa.Scalar | None
) -> torch.Tensor:
    """Return the rows that are not null with those that are, which `fill` replaces."""
    if fill is None or not column.null_count:
        return rows
    valid = torch.from_numpy(_numpy_copy(column.is_valid()))
    filled = rows.new_full((len(valid), *rows.shape[1:]), fill.as_py())
    filled[valid] = rows
    return filled


def _split(items: torch.Tensor | list[Any], lengths: list[int]) -> list[Any]:
    if isinstance(items, torch.Tensor):
        return list(torch.split(items, lengths)) if lengths else []
    return [items[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
