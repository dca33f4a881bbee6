"""Metrics as values that JSON can represent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of metrics: tensors with one element become numbers, NumPy's arrays lists.

    Raises
    ------
    TypeError
        If JSON cannot represent a value.
    """
    copy: dict[str, Any] = json.loads(json.dumps(dict(metrics), default=_plain))
    return copy


def _plain(value: Any) -> Any:
    """Convert a number of torch or NumPy to Python's, and an array of NumPy to a list."""
    try:
        return value.tolist() if type(value).__module__ == "numpy" else value.item()
    except (AttributeError, RuntimeError, ValueError):
        raise TypeError(
            "Metrics must be JSON-serializable, tensors with one element or NumPy arrays, but one "
            f"is {value!r}."
        ) from None
