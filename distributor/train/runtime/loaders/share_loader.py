"""Data loaders of `DatasetShard.dataset`, of which each rank has a share already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from distributor.data.epochs import Epoch, Order
from distributor.data.share import Share
from distributor.train.runtime.loaders.device_loader import DeviceLoader


class ShareSampler(Sampler[int]):
    """Samples what is left of an epoch of a rank's share, by the rows' numbers in the dataset.

    Parameters
    ----------
    share : Share
        The rank's share.

    Attributes
    ----------
    epoch : Epoch
        The epoch of the pass, and what has been read of it.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self.epoch = Epoch(0, Order())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        self._share.progress.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[int]:
        spans = self._share.spans(self.epoch)
        return iter(self._share.layout.row_numbers(spans).tolist())


class ShareLoader(DeviceLoader):
    """A loader of a rank's share, which has the share's epochs and position.

    Parameters
    ----------
    loader : DataLoader
        The loader of the batches. Its sampler is a `ShareSampler`.
    device : device or None
        The device to move the batches to.
    share : Share
        The rank's share.
    shuffle : bool
        Whether each epoch has its own random order.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device | None, share: Share, shuffle: bool
    ) -> None:
        super().__init__(loader, device)
        self._progress = share.progress
        self._share_sampler: ShareSampler = loader.sampler  # type: ignore[assignment]
        self._order = Order(shuffle=shuffle, whole=True)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        now = self._progress.begin(self._order)
        self._share_sampler.epoch = now.epoch
        for batch in super().__iter__():
            now.rows += self._loader.batch_size or 1
            yield batch
        self._progress.end(now)
