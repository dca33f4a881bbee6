"""What batches are: dicts of tensors or of NumPy arrays, pandas DataFrames, or Arrow tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from distributor.data.batches import Format
from distributor.data.tensors import TensorOptions, to_tensors

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
