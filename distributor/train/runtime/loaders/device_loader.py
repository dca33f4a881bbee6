"""Data loaders whose batches are moved to the rank's device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from distributor.rank.devices import move


class DeviceLoader(DataLoader[Any]):
    """Yields a loader's batches on a device, and has the loader's attributes.

    It is a DataLoader, because libraries that are handed one check for the class.

    Parameters
    ----------
    loader : DataLoader
        The loader of the batches.
    device : device or None
        The device to move them to; None leaves them on theirs.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        self.__dict__.update(vars(loader))  # DataLoader's own constructor would make another one
        self._loader = loader
        self._device = device

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in self._loader:
            yield batch if self._device is None else move(batch, self._device)
