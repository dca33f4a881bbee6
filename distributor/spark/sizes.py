"""Sizes as Spark's properties have them."""

from __future__ import annotations

import re


def size_in_bytes(text: str, unit: str) -> int:
    """Return a size such as ``1g`` or ``512m`` in bytes."""
    found = re.fullmatch(r"(\d+)([bkmgtp]?)b?", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is not a size, such as '1g'.")
    return int(found[1]) << 10 * "bkmgtp".index(found[2] or unit)
