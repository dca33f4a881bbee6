"""Tables of Arrow become dicts of tensors.

============================================  ==================================================
column                                        becomes
============================================  ==================================================
int8, int16, int32, int64, uint8, bool        a tensor of the same dtype
float16, float32, float64                     a tensor of the same dtype
uint16; uint32, uint64                        int32; int64 (an error if a value does not fit)
decimal                                       float64
date                                          int32: days since 1970-01-01
timestamp, with or without a time zone        int64: microseconds since 1970-01-01 00:00 (UTC)
time of day, duration                         int64: microseconds
string, binary                                a list of str or bytes
array of these, of equal lengths or ragged    a tensor of one more dimension, or as `ragged` says;
                                              of strings or binary, a list of lists
Spark ML vector, dense or sparse              float64, of two dimensions
struct                                        a dict of what its fields become
dictionary                                    what its values become
others, such as map, union and interval       an error
============================================  ==================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from distributor.data.tensors.columns import Column
from distributor.data.tensors.factory import leaves_of, make_columns
from distributor.data.tensors.options import TensorOptions

__all__ = ["TensorOptions", "check_columns", "to_tensors"]


def to_tensors(table: pa.Table, options: TensorOptions) -> dict[str, Any]:
    """Convert a table's columns to tensors, which own their memory.

    Parameters
    ----------
    table : pyarrow.Table
        The table.
    options : TensorOptions
        How its columns become tensors.

    Returns
    -------
    dict of str to torch.Tensor, list or dict
        What each column becomes, in order; a dict of such values for a struct.

    Raises
    ------
    TypeError
        If a column has a type that has no tensor.
    ValueError
        If a column contains nulls that nothing replaces, arrays of unequal lengths that `ragged`
        does not allow, or values that do not fit; or if an option does not fit a column.

    Examples
    --------
    >>> to_tensors(pa.table({"x": [[1, 2], [3, 4]], "name": ["a", "b"]}), TensorOptions())
    {'x': tensor([[1, 2],
            [3, 4]]), 'name': ['a', 'b']}
    """
    columns = make_columns(table.schema, options, "")
    return {
        name: column.convert(table.column(index).chunks)
        for index, (name, column) in enumerate(columns.items())
    }


def check_columns(
    schema: pa.Schema, options: TensorOptions, null_counts: Mapping[str, int] | None, name: str
) -> None:
    """Check, before the first batch, that a dataset's columns can become tensors.

    Parameters
    ----------
    schema : pyarrow.Schema
        The dataset's columns.
    options : TensorOptions
        How they become tensors.
    null_counts : mapping of str to int, or None
        The number of nulls of columns or fields of structs, if it is known.
    name : str
        The dataset's name, for messages.

    Raises
    ------
    TypeError
        If a column has a type that has no tensor.
    ValueError
        If a column contains nulls that nothing replaces, two columns have the same name, or an
        option names a column that does not exist, or does not fit the column.

    Examples
    --------
    >>> check_columns(pa.schema({"x": pa.int64()}), TensorOptions(fill=0), {"x": 3}, "train")
    """
    columns = make_columns(schema, options, name)
    known: dict[str, Column] = {leaf.path: leaf for leaf in leaves_of(columns)} | columns
    for path, count in (null_counts or {}).items():
        if path in known:
            known[path].check_nulls(count)
