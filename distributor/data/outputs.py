"""A model's outputs become columns: tensors, arrays or lists as Arrow arrays of a Spark type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

ELEMENTS = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
)
# Types that Spark does not have, and those with all of their values.
_WIDER = {pa.uint8(): pa.int16(), pa.float16(): pa.float32()}
_VECTOR = ["type", "size", "indices", "values"]  # the fields of Spark ML's vectors


def unsupported(kind: pa.DataType) -> pa.DataType | None:
    """Return the type, or that of an element or a field, that an output cannot have."""
    if pa.types.is_list(kind):
        return unsupported(kind.value_type)
    if pa.types.is_struct(kind):
        return next(filter(None, (unsupported(field.type) for field in kind)), None)
    return None if kind in ELEMENTS else kind


def named_outputs(value: Any, default: str) -> dict[str, Any]:
    """Return what a model has returned by the names of columns."""
    return dict(value) if isinstance(value, Mapping) else {default: value}


def type_of(value: Any, name: str) -> pa.DataType:
    """Return the type of the column for an output that has a value for each row."""
    if isinstance(value, Mapping):
        return pa.struct([(key, type_of(each, f"{name}.{key}")) for key, each in value.items()])
    found = _elements(value, name).type
    found = _WIDER.get(found, found)
    if found not in ELEMENTS:
        raise TypeError(f"Output {name!r} has the type {found}, for which there is no column.")
    for _ in _shape(value)[1:]:
        found = pa.list_(found)
    return found


def to_arrow(value: Any, kind: pa.DataType, rows: int, name: str) -> pa.Array:
    """Convert an output to a column.

    Parameters
    ----------
    value : tensor, array of numpy, list of str, or dict of these
        A value for each row along the first dimension.
    kind : pyarrow.DataType
        The column's type: an element, lists of them, one inside the other, a Spark ML vector, or a
        struct of these for a dict.
    rows : int
        The rows of the batch.
    name : str
        The column's name, for messages.

    Raises
    ------
    ValueError
        If there are other than so many rows or dimensions, or if a value does not fit the type.
    """
    if not pa.types.is_struct(kind):
        return _plain(value, kind, rows, name)
    fields = [field.name for field in kind]
    if isinstance(value, Mapping):
        if value.keys() != set(fields):
            raise ValueError(
                f"Output {name!r} is a dict of {', '.join(map(str, value))}, and its column is a "
                f"struct of {', '.join(fields)}."
            )
        parts = [
            to_arrow(value[key], kind.field(key).type, rows, f"{name}.{key}") for key in fields
        ]
    elif fields == _VECTOR:
        dense = pa.array(np.ones(rows, np.int8))
        sparse = [pa.nulls(rows, kind.field(each).type) for each in ("size", "indices")]
        parts = [dense, *sparse, _plain(value, kind.field("values").type, rows, name)]
    else:
        raise ValueError(f"Output {name!r} is no dict, and its column is a struct.")
    return pa.StructArray.from_arrays(parts, fields)


def _plain(value: Any, kind: pa.DataType, rows: int, name: str) -> pa.Array:
    shape = _shape(value)
    if shape[:1] != (rows,):
        found = f"{shape[0]} values" if shape else "one value"
        raise ValueError(
            f"Output {name!r} has {found} for {rows} rows. A model must return one for each row, "
            "along the first dimension."
        )
    depth = _depth(kind)
    if depth == 0 and shape[1:] == (1,):
        shape = shape[:1]
    if len(shape) - 1 != depth:
        raise ValueError(
            f"Output {name!r} has the shape {shape}, and its column has {depth} dimensions for "
            f"each row: {kind}."
        )
    values = _elements(value, name)
    element = kind
    while pa.types.is_list(element):
        element = element.value_type
    try:
        column = values.cast(element)
    except pa.ArrowInvalid as error:
        raise ValueError(f"Output {name!r} does not fit {element}: {error}") from None
    # The innermost lists come first.
    for size in reversed(shape[1:]):
        ends = np.arange(len(column) // size + 1 if size else rows + 1, dtype=np.int32) * size
        column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column)
    return column


def _depth(kind: pa.DataType) -> int:
    return 1 + _depth(kind.value_type) if pa.types.is_list(kind) else 0


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value),) if isinstance(value, (list, tuple)) else tuple(np.shape(value))


def _elements(value: Any, name: str) -> pa.Array:
    """Return all elements of an output, one after the other."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        # A copy: a model may return the same memory for each batch.
        return pa.array(np.array(value, order="C").reshape(-1))
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return pa.array(value, pa.string())
    raise TypeError(
        f"Output {name!r} is of the type {type(value).__name__}. A model must return a tensor, an "
        "array of numbers or a list of strings, or a dict of these by the names of columns."
    )
