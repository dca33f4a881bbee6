"""Tables with their rows in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def reordered(table: pa.Table, order: Any) -> pa.Table:
    """Return rows of a table.

    Parameters
    ----------
    table : pyarrow.Table
        The table.
    order : array of int64
        The numbers of the rows.
    """
    indices = pa.array(order)
    columns = [_taken(_whole(column), indices) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):  # an array would have too many bytes
        return combined.chunk(0) if combined.num_chunks == 1 else combined
    return combined


def _taken(column: pa.Array | pa.ChunkedArray, indices: pa.Array) -> pa.Array | pa.ChunkedArray:
    """Return rows of a column.

    Arrow takes arrays of equal length many times faster if the type says so.
    """
    if column.null_count or not len(column):
        return column.take(indices)
    if isinstance(column, pa.StructArray):
        parts = [_taken(part, indices) for part in column.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(column.type))
    if isinstance(column, (pa.ListArray, pa.LargeListArray)):
        bounds = pc.min_max(pc.list_value_length(column))
        size = bounds["min"].as_py()
        if size == bounds["max"].as_py() and size > 0:
            fixed = pa.FixedSizeListArray.from_arrays(column.flatten(), size)
            return _with_type(fixed.take(indices), column.type, size)
    return column.take(indices)


def _with_type(rows: pa.FixedSizeListArray, kind: pa.DataType, size: int) -> pa.Array:
    """Return arrays of equal length as arrays of a type that allows any length."""
    width = np.int64 if pa.types.is_large_list(kind) else np.int32
    offsets = pa.py_buffer(np.arange(len(rows) + 1, dtype=width) * width(size))
    return pa.Array.from_buffers(kind, len(rows), [None, offsets], children=[rows.flatten()])
