"""Checks the arguments of passes over a dataset, before any row is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from distributor.data.epochs import Order
from distributor.rank.devices import device as rank_device

if TYPE_CHECKING:
    import torch

BATCH_FORMATS = ("default", "numpy", "pandas", "pyarrow", None)
"""The formats of `DatasetShard.iter_batches`; None is "pyarrow", and "default" is "numpy"."""


@dataclass(frozen=True)
class PassOptions:
    """What a pass reads: the rows of its batches, their order, and how far ahead.

    Parameters
    ----------
    batch_size : int or None
        The rows of a batch; None makes each window a batch.
    drop_last : bool
        Whether the last batch is dropped if it is smaller.
    prefetch_batches : int
        Batches that are prepared ahead.
    order : Order
        The order of the rows.
    """

    batch_size: int | None = None
    drop_last: bool = False
    prefetch_batches: int = 0
    order: Order = field(default_factory=Order)


def pass_options(
    *,
    batch_size: int | None,
    drop_last: bool = False,
    prefetch_batches: int = 0,
    shuffle: bool = False,
    seed: int = 0,
    local_shuffle_buffer_size: int | None = None,
    local_shuffle_seed: int | None = None,
) -> PassOptions:
    """Check the arguments of a pass.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If a number is too small.
    """
    size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
    ahead = whole_number("prefetch_batches", prefetch_batches, 0)
    check_bool("drop_last", drop_last)
    check_bool("shuffle", shuffle)
    seed = whole_number("seed", seed)
    if local_shuffle_seed is not None:
        seed = whole_number("local_shuffle_seed", local_shuffle_seed)
    buffer_rows = None
    if local_shuffle_buffer_size is not None:
        buffer_rows = whole_number("local_shuffle_buffer_size", local_shuffle_buffer_size, 1)
        if size is None or buffer_rows < size:
            raise ValueError(
                f"local_shuffle_buffer_size is {buffer_rows}, so batch_size must be between 1 and "
                f"{buffer_rows}, but is {size}."
            )
    return PassOptions(size, drop_last, ahead, Order(shuffle, buffer_rows, seed))


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument that is an integer, and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, but is {value!r}.")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}.")
    return int(value)


def check_bool(name: str, value: Any) -> None:
    """Check that an argument is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, but is {value!r}.")


def check_callable(name: str, value: Callable[..., Any] | None) -> None:
    """Check that an argument is callable, or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, but is {value!r}.")


def check_collate_fn(
    collate_fn: Callable[[Any], Any] | None,
    dtypes: torch.dtype | Mapping[str, torch.dtype] | None,
    fill: Any,
) -> None:
    """Check that nothing is asked of the conversion to tensors that `collate_fn` replaces."""
    check_callable("collate_fn", collate_fn)
    if collate_fn is None:
        return
    for name, value in (("dtypes", dtypes), ("fill", fill)):
        if value is not None:
            raise ValueError(
                f"{name} and collate_fn exclude each other: collate_fn itself converts the NumPy "
                "arrays that it is called with."
            )


def check_batch_format(batch_format: Any) -> None:
    """Check that an argument is one of the `BATCH_FORMATS`."""
    if batch_format not in BATCH_FORMATS:
        listed = ", ".join(map(repr, BATCH_FORMATS))
        raise ValueError(f"batch_format must be one of {listed}, but is {batch_format!r}.")


def checked_device(device: Any) -> torch.device:
    """Return the device that an argument names; "auto" is this rank's."""
    import torch

    if device == "auto":
        return rank_device()
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device must be "auto" or a device of torch: {error}') from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(found)!r}, but torch finds no GPU here.")
    return found
