"""A model's outputs become columns: tensors, arrays or lists as Arrow arrays of a Spark type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

# Spark's names of the types that an element of an output may have.
ELEMENTS = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
}
_NAMES = {kind: name for name, kind in ELEMENTS.items()}
# Types that Spark does not have, and those with all of their values.
_WIDER = {pa.uint8(): pa.int16(), pa.float16(): pa.float32()}
_ARRAY = "array<"


def arrow_type(spark_type: str) -> pa.DataType:
    """Return the Arrow type of a Spark type, such as "array<float>"; KeyError for other types."""
    if spark_type.startswith(_ARRAY) and spark_type.endswith(">"):
        return pa.list_(arrow_type(spark_type.removeprefix(_ARRAY).removesuffix(">")))
    return ELEMENTS[spark_type]


def named_outputs(value: Any, default: str) -> dict[str, Any]:
    """Return what a model has returned by the names of columns."""
    return dict(value) if isinstance(value, Mapping) else {default: value}


def spark_type_of(value: Any, name: str) -> str:
    """Return the Spark type of a column that has an output for each row."""
    found = _elements(value, name)
    kind = _WIDER.get(found.type, found.type)
    if kind not in _NAMES:
        raise TypeError(f"Output {name!r} has the type {kind}, for which there is no column.")
    dimensions = _shape(value)[1:]
    return _ARRAY * len(dimensions) + _NAMES[kind] + ">" * len(dimensions)


def to_arrow(value: Any, kind: pa.DataType, rows: int, name: str) -> pa.Array:
    """Convert an output to a column.

    Parameters
    ----------
    value : tensor, array of numpy, or list of str
        A value for each row along the first dimension.
    kind : pyarrow.DataType
        The column's type: an element, or lists of them, one inside the other.
    rows : int
        The rows of the batch.
    name : str
        The column's name, for messages.

    Raises
    ------
    ValueError
        If there are other than so many rows or dimensions, or if a value does not fit the type.
    """
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
        return pa.array(np.ascontiguousarray(value).reshape(-1))
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return pa.array(value, pa.string())
    raise TypeError(
        f"Output {name!r} is of the type {type(value).__name__}. A model must return a tensor, an "
        "array of numbers or a list of strings, or a dict of these by the names of columns."
    )
