"""Makes a data loader one of this rank's part of the dataset, on this rank's device."""

from __future__ import annotations

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
from distributor._compat.accelerate import mark_as_prepared
from distributor.data.rank_share import is_rank_share, rows_of_all_ranks
from distributor.train.runtime.loaders.device_loader import DeviceLoader
from distributor.train.runtime.loaders.resumable_loader import ResumableLoader, ShardSampler
from distributor.train.runtime.loaders.share_loader import ShareLoader, ShareSampler
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
    is_known = type(sampler) in (SequentialSampler, RandomSampler) and not _resamples(sampler)
    return None if is_known else sampler


def _warn_of_replacement(loader: DataLoader[Any], custom: Any) -> None:
    """Warn that a loader's own sampler is replaced; a batch sampler would be lost, and is refused.

    Raises
    ------
    ValueError
        If it is a batch sampler.
    """
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


def _resamples(sampler: Any) -> bool:
    """Return whether a sampler yields anything but each sample once."""
    if not isinstance(sampler, RandomSampler):
        return False
    return sampler.replacement or sampler.num_samples != len(sampler.data_source)
