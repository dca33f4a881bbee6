"""How ranks get equally many rows of a dataset whose size is not divisible by their number."""

from __future__ import annotations

from typing import Literal, TypeAlias

Equal: TypeAlias = Literal["drop", "pad", False]
"""Drop the rows that are left over, repeat some rows, or (False) leave a difference of one row."""


def check_equal(equal: object) -> None:
    """Check a value of ``equal``.

    Raises
    ------
    ValueError
        If it is another value.
    """
    if equal is not False and equal not in ("drop", "pad"):
        raise ValueError(f"equal must be 'pad', 'drop' or False, but is {equal!r}.")
