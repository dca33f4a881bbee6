"""Metrics as values that JSON can represent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def json_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of metrics, in which tensors with one element are numbers.

    Raises
    ------
    TypeError
        If JSON cannot represent a value.
    """
    copy: dict[str, Any] = json.loads(json.dumps(dict(metrics), default=_plain_number))
    return copy


def _plain_number(value: Any) -> Any:
    """Convert a number of torch or numpy to Python's."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError):
        raise TypeError(
            f"Metrics must be JSON-serializable, or tensors with one element, but one is {value!r}."
        ) from None
