"""A model's outputs become columns: tensors, arrays or lists as Arrow arrays of a Spark type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from distributor.data.tensors import VECTOR_FIELDS, is_any

if TYPE_CHECKING:
    from numpy.typing import NDArray

ELEMENTS = ("boolean", "signed_integer", "float32", "float64", "string", "binary")
# Types that Spark does not have, and those with all of their values.
_WIDER = {pa.uint8(): pa.int16(), pa.float16(): pa.float32()}


def unsupported(kind: pa.DataType) -> pa.DataType | None:
    """Return the type, or that of an element or a field, that an output cannot have."""
    if pa.types.is_list(kind):
        return unsupported(kind.value_type)
    if pa.types.is_struct(kind):
        return next(filter(None, (unsupported(field.type) for field in kind)), None)
    return None if is_any(kind, *ELEMENTS) else kind


def named_outputs(value: Any, default: str) -> dict[str, Any]:
    """Return what a model has returned by the names of columns."""
    return dict(value) if isinstance(value, Mapping) else {default: value}


def type_of(value: Any, name: str) -> pa.DataType:
    """Return the type of the column for an output that has a value for each row."""
    if isinstance(value, Mapping):
        return pa.struct([(key, type_of(each, f"{name}.{key}")) for key, each in value.items()])
    numbers = _numbers(value)
    if numbers is None:
        found = _listed_column(value, name).type
    else:
        found = pa.array(numbers[:0].reshape(-1) if numbers.ndim else [numbers.item()]).type
        found = _WIDER.get(found, found)
        for _ in numbers.shape[1:]:
            found = pa.list_(found)
    kind = unsupported(found)
    if kind == pa.null():
        raise TypeError(
            f"Output {name!r} has no value in the first rows but None and empty lists. Name its "
            "type, such as outputs='words array<string>'."
        )
    if kind is not None:
        raise TypeError(f"Output {name!r} has the type {kind}, for which there is no column.")
    return found


def to_arrow(value: Any, kind: pa.DataType, rows: int, name: str) -> pa.Array:
    """Convert an output to a column.

    Parameters
    ----------
    value : tensor, array of numpy, list, or dict of these
        A value for each row along the first dimension. Lists may contain lists, of any lengths, and
        None for nulls.
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
    elif fields == VECTOR_FIELDS:
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
    numbers = _numbers(value)
    if numbers is None:
        return _cast(_listed_column(value, name), kind, name)
    depth, element = 0, kind
    while pa.types.is_list(element):
        depth, element = depth + 1, element.value_type
    if depth == 0 and shape[1:] == (1,):
        shape = shape[:1]
    if len(shape) - 1 != depth:
        raise ValueError(
            f"Output {name!r} has the shape {shape}, and its column has {depth} dimensions for "
            f"each row: {kind}."
        )
    # A copy: a model may return the same memory for each batch.
    column = _cast(pa.array(np.array(numbers, order="C").reshape(-1)), element, name)
    # The innermost lists come first.
    for size in reversed(shape[1:]):
        ends = np.arange(len(column) // size + 1 if size else rows + 1, dtype=np.int32) * size
        column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), column)
    return column


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value),) if isinstance(value, (list, tuple)) else tuple(np.shape(value))


def _cast(column: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"Output {name!r} does not fit {kind}: {error}") from None


def _numbers(value: Any) -> NDArray[Any] | None:
    """Return a tensor or array of numbers as an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    is_plain = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    return value if is_plain and value.dtype.kind in "biuf" else None


def _listed_column(value: Any, name: str) -> pa.Array:
    listed = _listed(value)
    if not isinstance(listed, list):
        raise TypeError(
            f"Output {name!r} is of the type {type(value).__name__}. A model must return a tensor, "
            "an array of numbers or texts, or a list with a value for each row, or a dict of these "
            "by the names of columns."
        )
    try:
        return pa.array(listed)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise TypeError(f"Output {name!r} has values of no common type: {error}") from None


def _listed(value: Any) -> Any:
    """Return lists in place of tuples, tensors and arrays."""
    if isinstance(value, torch.Tensor):
        value = _numbers(value)
    # Of times in nanoseconds, numpy makes integers.
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufOUS":
        value = value.tolist()
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value
