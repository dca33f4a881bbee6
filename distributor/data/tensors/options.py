"""How columns become tensors."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

Ragged: TypeAlias = Literal["error", "nested", "list"]
"""What arrays become whose lengths may differ."""


@dataclass(frozen=True)
class TensorOptions:
    """How columns become tensors. A field of a struct is named as in ``"address.zip"``.

    Parameters
    ----------
    dtypes : torch.dtype or mapping of str to torch.dtype, optional
        The dtype of all tensors, or of those of some columns; the others have the dtype of the
        column's type (see the table of `distributor.data.tensors`).
    fill : object or mapping of str to object, optional
        What replaces nulls: a number for all columns of numbers, or a value of each column. Nulls
        of other columns are an error. It also replaces the elements of an array or vector that is
        null, if all others have the same length.
    ragged : "error", "nested" or "list", or mapping of str to these, default "error"
        What arrays become whose type does not determine their length. With "error", they have the
        same length, and become a tensor of one more dimension. With "nested", they become a nested
        tensor of layout ``torch.jagged``; only the outermost of nested arrays may differ in length.
        With "list", they become a list of tensors; nested arrays become lists of lists of tensors.
        Columns that a mapping does not name have "error".
    vectors : frozenset of str
        The columns that contain Spark ML vectors, as structs. They have the same size.

    Raises
    ------
    TypeError
        If a value has the wrong type.
    ValueError
        If `ragged` is another one.

    Examples
    --------
    >>> options = TensorOptions(dtypes=torch.float32, fill={"age": -1}, ragged={"tokens": "list"})
    """

    dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None
    fill: Any = None
    ragged: Ragged | Mapping[str, Ragged] = "error"
    vectors: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for dtype in _values(self.dtypes):
            if not isinstance(dtype, torch.dtype | None):
                raise TypeError(
                    "dtypes must be a torch.dtype, or a mapping of columns' names to these, but is "
                    f"or contains {dtype!r}."
                )
        for ragged in _values(self.ragged):
            if ragged not in get_args(Ragged):
                raise ValueError(
                    "ragged must be 'error', 'nested' or 'list', or a mapping of columns' names to "
                    f"these, but is or contains {ragged!r}."
                )
        if not isinstance(self.fill, numbers.Number | Mapping | None):
            raise TypeError(
                "fill must be a number, which replaces nulls in all columns of numbers, or a "
                f"mapping of columns' names to values, but is {self.fill!r}."
            )

    @property
    def has_nested(self) -> bool:
        """Whether columns may become nested tensors, whose rows cannot be sliced."""
        return "nested" in _values(self.ragged)

    def dtype_of(self, path: str) -> torch.dtype | None:
        """Return the dtype of a column's tensor; None if it follows from the column's type."""
        return self.dtypes.get(path) if isinstance(self.dtypes, Mapping) else self.dtypes

    def ragged_of(self, path: str) -> Ragged:
        """Return what a column's arrays become."""
        return self.ragged.get(path, "error") if isinstance(self.ragged, Mapping) else self.ragged


def _values(option: Any) -> list[Any]:
    return list(option.values()) if isinstance(option, Mapping) else [option]
