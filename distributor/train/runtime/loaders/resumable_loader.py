"""Data loaders that yield a rank's share of an epoch, and resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from distributor.train.runtime.loaders.device_loader import DeviceLoader


class ShardSampler(Sampler[int]):
    """Samples a rank's share of an epoch, whose order does not depend on the number of ranks.

    Parameters
    ----------
    length : int
        The number of samples in the dataset.
    shuffle : bool
        Whether each epoch has its own random order.
    rank, size : int
        The rank, and the number of ranks.
    seed : int
        Determines the order, together with the epoch.

    Attributes
    ----------
    epoch : int
        The epoch of the next pass.
    start : int
        The number of its samples that all ranks together have already consumed.
    is_set : bool
        Whether `set_epoch` has been called since the last pass began.
    length, shuffle, rank, num_replicas, seed, drop_last, num_samples, total_size
        What torch's DistributedSampler has: the parameters, False, and the samples of an epoch for
        this rank and for all ranks.
    """

    drop_last = False

    def __init__(self, length: int, shuffle: bool, rank: int, size: int, seed: int = 0) -> None:
        self.epoch = self.start = 0
        self.is_set = False
        self.length, self.shuffle, self.rank, self.seed = length, shuffle, rank, seed
        self.num_replicas = size
        self.num_samples = -(-length // size)
        self.total_size = self.num_samples * size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        self.epoch, self.is_set = epoch, True

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        rest = self._order()[self.start :]
        missing = -len(rest) % self.num_replicas
        while missing and rest:  # all ranks need equally many, or a collective would hang
            rest += rest[:missing]
            missing = -len(rest) % self.num_replicas
        return iter(rest[self.rank :: self.num_replicas])

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


class ResumableLoader(DeviceLoader):
    """A loader that knows its position in the epoch, and can resume from one.

    Parameters
    ----------
    loader : DataLoader
        The loader of the batches; its sampler is a `ShardSampler`.
    device : device or None
        The device to move the batches to.
    identity : mapping of str to int
        What is the same on all ranks, and must be when it resumes: the length of the dataset, and
        the number of ranks if the dataset is one rank's share.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device | None, identity: Mapping[str, int]
    ) -> None:
        super().__init__(loader, device)
        self._identity = dict(identity)
        self._sampler: ShardSampler = loader.sampler  # type: ignore[assignment]
        self._at: tuple[int, int] = (0, 0)
        self._has_begun = False
        self._resume_position: Mapping[str, int] | None = None

    def position(self) -> dict[str, int]:
        """Return the epoch, and the number of its samples that have been yielded.

        All ranks together have yielded so many, or each of its share.
        """
        epoch, seen = self._at
        return {"epoch": epoch, "seen": seen, **self._identity}

    def resume_from(self, position: Mapping[str, int]) -> None:
        """Begin the first pass at a position, if that is in the same epoch and dataset.

        If the dataset is a share, which other ranks had, begin its epoch again.
        """
        if position.get("length") == self._identity["length"]:
            if not self._identity.items() <= position.items():
                position = {**position, "seen": 0}
            self._resume_position = position
            self._sampler.epoch = position["epoch"]
            self._at = position["epoch"], position["seen"]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler, position = self._sampler, self._resume_position
        if self._has_begun and not sampler.is_set:
            sampler.epoch += 1
        self._has_begun, sampler.is_set = True, False
        resumes = position is not None and position["epoch"] == sampler.epoch
        sampler.start = position["seen"] if position and resumes else 0
        self._resume_position = None
        epoch, seen = sampler.epoch, sampler.start
        for batch in super().__iter__():
            seen = min(seen + (self._loader.batch_size or 1) * sampler.num_replicas, sampler.length)
            self._at = epoch, seen
            yield batch
        self._at = epoch + 1, 0
