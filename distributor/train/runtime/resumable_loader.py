"""A rank's share of a dataset, on its device, resumed from a checkpoint's position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from distributor import runtime
from distributor.train.runtime import reporter


class Share(Sampler[int]):
    """A rank's share of an epoch, whose order does not depend on the number of ranks.

    Parameters
    ----------
    length : int
        How many samples there are.
    shuffle : bool
        Whether each epoch has an order of its own.
    rank, size : int
        Whose share, among how many.
    seed : int
        With the epoch, what the order follows from.

    Attributes
    ----------
    epoch : int
        Which epoch the next pass is of.
    start : int
        How many of its samples have been trained.
    is_set : bool
        Whether somebody has said which epoch that is.
    """

    def __init__(self, length: int, shuffle: bool, rank: int, size: int, seed: int = 0) -> None:
        self.epoch = self.start = 0
        self.is_set = False
        self.length, self.size = length, size
        self._shuffle, self._rank, self._seed = shuffle, rank, seed

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is of; without, it is the one after the last pass's."""
        self.epoch, self.is_set = epoch, True

    def __len__(self) -> int:
        return -(-self.length // self.size)

    def __iter__(self) -> Iterator[int]:
        rest = self._order()[self.start :]
        lacking = -len(rest) % self.size
        while lacking and rest:  # all ranks need as many, or a collective waits for ever
            rest += rest[:lacking]
            lacking = -len(rest) % self.size
        return iter(rest[self._rank :: self.size])

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self.length))
        generator = torch.Generator()
        generator.manual_seed(self._seed + self.epoch)
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


class Loader:
    """Gives batches on a device; has the attributes of the loader that it gets them from.

    Parameters
    ----------
    loader : DataLoader
        Where the batches come from.
    device : device or None
        Where to; None leaves them where they are.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        self._loader = loader
        self._device = device

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch if self._device is None else _moved(batch, self._device)


class ShareLoader(Loader):
    """One that knows how far it is.

    Parameters
    ----------
    loader : DataLoader
        Where the batches come from, with a `Share` as its sampler.
    device : device or None
        Where to.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        super().__init__(loader, device)
        self._share: Share = loader.sampler  # type: ignore[assignment]
        self._at: tuple[int, int] = (0, 0)
        self._has_passed = False
        self._go_on_from: Mapping[str, int] | None = None

    def position(self) -> dict[str, int]:
        """Say how much of which epoch has been given, by all ranks together."""
        epoch, seen = self._at
        return {"epoch": epoch, "seen": seen, "length": self._share.length}

    def go_on(self, position: Mapping[str, int]) -> None:
        """Have the first pass begin at a position, if it is of that epoch and dataset."""
        if position["length"] == self._share.length:
            self._go_on_from = position
            self._share.epoch = position["epoch"]
            self._at = position["epoch"], position["seen"]

    def __iter__(self) -> Iterator[Any]:
        share, first = self._share, self._go_on_from
        if self._has_passed and not share.is_set:
            share.epoch += 1
        self._has_passed, share.is_set = True, False
        goes_on = first is not None and first["epoch"] == share.epoch
        share.start = first["seen"] if first and goes_on else 0
        self._go_on_from = None
        epoch, seen = share.epoch, share.start
        for batch in super().__iter__():
            seen = min(seen + (self._loader.batch_size or 1) * share.size, share.length)
            self._at = epoch, seen
            yield batch
        self._at = epoch + 1, 0


def prepared(
    loader: DataLoader[Any], share: bool, device: torch.device | None, pinned: bool
) -> Loader:
    """Do what `distributor.train.torch.prepare_data_loader` says."""
    pin = pinned and device is not None and device.type == "cuda"
    if not share or isinstance(loader.dataset, IterableDataset):
        return Loader(loader, device)
    if isinstance(loader.sampler, DistributedSampler):
        return Loader(loader, device)
    found = ShareLoader(_with_share(loader, pin), device)
    if reporter.is_kept():
        position = reporter.current().follow(found.position)
        if position is not None:
            found.go_on(position)
    return found


def _with_share(loader: DataLoader[Any], pin: bool) -> DataLoader[Any]:
    _check_samplers(loader)
    share = Share(
        len(loader.dataset),  # type: ignore[arg-type]
        shuffle=isinstance(loader.sampler, RandomSampler),
        rank=runtime.get_global_rank(),
        size=runtime.get_world_size(),
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=share,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory or pin,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )


def _check_samplers(loader: DataLoader[Any]) -> None:
    batches = loader.batch_sampler
    sampler = loader.sampler
    known = type(sampler) in (SequentialSampler, RandomSampler) and not _draws(sampler)
    ours = batches is None or (type(batches) is BatchSampler and loader.batch_size is not None)
    if not known or not ours:
        unknown = batches if known else sampler
        raise ValueError(
            f"prepare_data_loader gives each rank its share by a sampler of its own, and the "
            f"loader's {type(unknown).__name__} would be lost. Let that one give shares, and "
            "pass add_dist_sampler=False."
        )


def _draws(sampler: Any) -> bool:
    """Tell whether a sampler takes other samples than each one once."""
    if not isinstance(sampler, RandomSampler):
        return False
    return sampler.replacement or sampler.num_samples != len(sampler.data_source)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: _moved(part, device) for key, part in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_moved(part, device) for part in batch)
    return batch
