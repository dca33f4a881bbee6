"""Data loaders that `prepare_data_loader` returns: of a rank's share, on its device, resumable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from distributor import runtime
from distributor._compat.huggingface import mark_as_prepared
from distributor.data.epochs import Epoch, Order
from distributor.data.share import Share
from distributor.data.source import is_rank_share, rows_of_all_ranks
from distributor.rank.context import move
from distributor.train.runtime.session import has_storage, session


def prepare(
    loader: DataLoader[Any], shard: bool, device: torch.device | None, pin_memory: bool
) -> DeviceLoader:
    """Prepare a loader as `distributor.train.torch.prepare_data_loader` documents."""
    pin = pin_memory and device is not None and device.type == "cuda"
    if not shard or isinstance(loader.dataset, IterableDataset):
        return DeviceLoader(loader, device)
    if isinstance(loader.sampler, (DistributedSampler, ShardSampler)):
        return DeviceLoader(loader, device)  # it yields this rank's share already
    is_share = is_rank_share(loader.dataset)
    if (custom := _custom_sampler(loader)) is not None:
        if is_share or runtime.get_world_size() == 1:
            return DeviceLoader(loader, device)
        _warn_of_replacement(loader, custom)
    rank, size = runtime.get_global_rank(), runtime.get_world_size()
    if is_share:  # divided already, in another way for each number of ranks
        if (share_loader := _share_loader(loader, device, pin)) is not None:
            return share_loader
        identity = {"length": rows_of_all_ranks(loader.dataset), "ranks": size}
        rank, size = 0, 1
    else:
        identity = {"length": len(loader.dataset)}  # type: ignore[arg-type]
    sampler = ShardSampler(
        len(loader.dataset),  # type: ignore[arg-type]
        shuffle=_shuffles(loader),
        rank=rank,
        size=size,
    )
    prepared = ResumableLoader(_with_sampler(loader, sampler, pin), device, identity)
    mark_as_prepared(prepared)  # an Accelerator would leave each rank a share of its share
    if has_storage():
        position = session.reporter.register_loader(prepared.position)
        if position is not None:
            prepared.resume_from(position)
    return prepared


def _share_loader(
    loader: DataLoader[Any], device: torch.device | None, pin: bool
) -> ShareLoader | None:
    """Return a loader with the position of the share; None if the dataset has parts of shares."""
    from distributor.data.torch_datasets import ShardDataset  # which needs pyarrow

    if not isinstance(loader.dataset, ShardDataset):
        return None
    share = loader.dataset.share
    sampled = _with_sampler(loader, ShareSampler(share), pin, loader.dataset.of_all_rows())
    prepared = ShareLoader(sampled, device, share, _shuffles(loader))
    mark_as_prepared(prepared)
    return prepared


def _shuffles(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.sampler, SequentialSampler)


def _with_sampler(
    loader: DataLoader[Any], sampler: Sampler[int], pin: bool, dataset: Dataset[Any] | None = None
) -> DataLoader[Any]:
    return DataLoader(
        dataset or loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
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


def _custom_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler or batch sampler that the loader was given; None if it made its own."""
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is not None and (type(batches) is not BatchSampler or loader.batch_size is None):
        return batches
    if type(sampler) is RandomSampler:  # perhaps one that yields not each sample once
        resamples = sampler.replacement or sampler.num_samples != len(sampler.data_source)
        return sampler if resamples else None
    return None if type(sampler) is SequentialSampler else sampler


def _warn_of_replacement(loader: DataLoader[Any], custom: Any) -> None:
    """Warn that a loader's own sampler is replaced; refuse a batch sampler, which would be lost."""
    name = type(custom).__name__
    if custom is loader.batch_sampler:
        raise ValueError(
            "prepare_data_loader replaces the loader's sampler to shard the dataset, which would "
            f"discard the batches of its {name}. If that one shards the dataset, pass "
            "add_dist_sampler=False."
        )
    if runtime.get_global_rank() == 0:
        print(
            f"distributor: the {name} of a data loader is replaced: the ranks shuffle the dataset "
            "and share it. Pass prepare_data_loader(..., add_dist_sampler=False) to keep it.",
            flush=True,
        )


class DeviceLoader(DataLoader[Any]):
    """Yields a loader's batches on a device, if there is one, and has the loader's attributes.

    It is a DataLoader, because libraries that are handed one check for the class.
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


class ShardSampler(Sampler[int]):
    """Samples a rank's share of an epoch, whose order does not depend on the number of ranks.

    Has the attributes of torch's DistributedSampler. Seed and epoch determine the order.
    """

    drop_last = False

    def __init__(self, length: int, shuffle: bool, rank: int, size: int, seed: int = 0) -> None:
        self.epoch = 0  # of the next pass
        self.start = 0  # samples of it that all ranks together have already consumed
        self.is_set = False  # whether `set_epoch` has been called since the last pass began
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
    """A loader with a `ShardSampler` that knows its position in the epoch, and can resume from one.

    `identity` is the same on all ranks, and must be when it resumes: the length of the dataset, and
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
        """Return the epoch, and the number of its samples that have been yielded."""
        epoch, seen = self._at  # by all ranks together, or by each if the dataset is its share
        return {"epoch": epoch, "seen": seen, **self._identity}

    def resume_from(self, position: Mapping[str, int]) -> None:
        """Begin the first pass at a position, if that is in the same epoch and dataset."""
        if position.get("length") == self._identity["length"]:
            if not self._identity.items() <= position.items():
                position = {**position, "seen": 0}  # other ranks had the share
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


class ShareSampler(Sampler[int]):
    """Samples what is left of an epoch of a rank's share, by the rows' numbers in the dataset."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self.epoch = Epoch(0, Order())  # of the pass, and what has been read of it

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        self._share.progress.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[int]:
        spans = self._share.spans(self.epoch)
        return iter(self._share.layout.row_numbers(spans).tolist())


class ShareLoader(DeviceLoader):
    """A loader with a `ShareSampler`, which has the share's epochs and position."""

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
