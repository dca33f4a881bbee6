"""Data loaders that `prepare_data_loader` returns: of a rank's share, on its device, resumable."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice, takewhile
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
from distributor.data.batches import Share
from distributor.data.epochs import Epoch, Order, Pass, Progress
from distributor.data.torch_datasets import ShardDataset, rows_of_all_ranks
from distributor.rank.context import move, worker_context
from distributor.rank.membership import Membership
from distributor.train.runtime.session import has_storage, session

# What is kept of a loader with another sampler.
_OPTIONS = (
    *("batch_size", "num_workers", "collate_fn", "drop_last", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
    "pin_memory_device",
)


def prepare(
    loader: DataLoader[Any],
    shard: bool,
    device: torch.device | None,
    pin_memory: bool,
    keep_global_batch: bool = False,
) -> DeviceLoader:
    """Prepare a loader as `distributor.train.torch.prepare_data_loader` documents."""
    dataset: Any = loader.dataset
    if not shard or isinstance(dataset, IterableDataset):
        return DeviceLoader(loader, device)
    if isinstance(loader.sampler, DistributedSampler):
        return DeviceLoader(loader, device)  # it yields this rank's share already
    rows_of_share = rows_of_all_ranks(dataset)
    is_share = rows_of_share is not None
    rank, num_ranks = runtime.get_global_rank(), runtime.get_world_size()
    if (custom := _custom_sampler(loader)) is not None:
        if is_share or num_ranks == 1:
            return DeviceLoader(loader, device)
        _warn_of_replacement(loader, custom)
    order = Order(shuffle=not isinstance(loader.sampler, SequentialSampler), whole=True)
    sampler: ShareSampler | ShardSampler
    if isinstance(dataset, ShardDataset):
        progress = dataset.share.progress
        sampler = ShareSampler(dataset.share)
        dataset = dataset.of_all_rows()
    else:
        rows = len(dataset) if rows_of_share is None else rows_of_share
        progress = Progress(None, rows, rank, num_ranks)
        sampler = ShardSampler(dataset, progress, order.shuffle, is_share)
        if has_storage():
            progress.register(session.reporter.register_loader)
    pin = pin_memory and device is not None and device.type == "cuda"
    others = _with_sampler(loader, dataset, sampler, pin), device, progress, order
    membership = worker_context().membership
    if membership is not None and is_share:
        membership.refuse("a data loader reads a shard of a dataset")
    if membership is not None and isinstance(sampler, ShardSampler):
        prepared: ResumableLoader = SharedLoader(*others, membership, keep_global_batch)
    else:
        prepared = ResumableLoader(*others)
    mark_as_prepared(prepared)  # an Accelerator would leave each rank a share of its share
    return prepared


def _with_sampler(
    loader: DataLoader[Any], dataset: Dataset[Any], sampler: Sampler[Any], pin: bool
) -> DataLoader[Any]:
    kept = {name: getattr(loader, name) for name in _OPTIONS}
    return DataLoader(dataset, sampler=sampler, pin_memory=loader.pin_memory or pin, **kept)


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


class ShardSampler(DistributedSampler[Any]):
    """Samples a rank's share of what is left of an epoch.

    The order does not depend on the number of ranks. If the dataset is one rank's share already, it
    samples all that is left of it.
    """

    def __init__(
        self, dataset: Dataset[Any], progress: Progress, shuffle: bool, is_share: bool = False
    ) -> None:
        num_ranks, rank = (1, 0) if is_share else (progress.num_ranks, progress.rank)
        super().__init__(dataset, num_ranks, rank, shuffle)
        self._progress, self._is_share = progress, is_share
        self.left = Epoch(0, Order(shuffle))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        self._progress.set_epoch(epoch)

    def share(self, rank: int, num_ranks: int) -> None:
        """Be one of so many ranks from the next pass on."""
        self.rank, self.num_replicas = rank, num_ranks
        self.num_samples = -(-len(self.dataset) // num_ranks)  # type: ignore[arg-type]
        self.total_size = self.num_samples * num_ranks

    def __iter__(self) -> Iterator[int]:
        self.epoch = self.left.number
        whole: DistributedSampler[Any]
        whole = DistributedSampler(self.dataset, 1, 0, self.left.order.shuffle)
        whole.set_epoch(self.epoch)
        rest = list(whole)[self._num_read() :]
        # All ranks need equally many, or a collective would hang.
        total = -(-len(rest) // self.num_replicas) * self.num_replicas
        return islice(cycle(rest), self.rank, total, self.num_replicas)

    def _num_read(self) -> int:
        """Return how many samples of the epoch have been read."""
        history = self.left.history
        if not self._is_share:
            return sum(ranks * rows for ranks, rows in history)
        # Other numbers of ranks had other shares, and the epoch began again.
        ranks = self._progress.num_ranks
        return sum(rows for _, rows in takewhile(lambda at: at[0] == ranks, reversed(history)))


class ShareSampler(Sampler[int]):
    """Samples what is left of an epoch of a rank's share, by the rows' numbers in the dataset."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self.left = Epoch(0, Order())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        self._share.progress.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[int]:
        spans = self._share.spans(self.left)
        return iter(self._share.layout.row_numbers(spans).tolist())


class ResumableLoader(DeviceLoader):
    """A loader that samples what is left of an epoch; checkpoints contain its position there."""

    def __init__(
        self, loader: DataLoader[Any], device: torch.device | None, progress: Progress, order: Order
    ) -> None:
        super().__init__(loader, device)
        self._progress, self._order = progress, order

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        now = self._progress.begin(self._order)
        sampler: Any = self._loader.sampler
        sampler.left = now.epoch
        for batch in super().__iter__():
            now.rows += self._loader.batch_size or 1
            yield batch
        self._progress.end(now)


class SharedLoader(ResumableLoader):
    """A loader whose ranks share the rest of an epoch anew when their members change.

    A batch counts once its step is done: those of a step that changed nothing, and those of a lost
    rank, are given out again.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device | None,
        progress: Progress,
        order: Order,
        membership: Membership,
        keeps_global_batch: bool,
    ) -> None:
        super().__init__(loader, device, progress, order)
        self._membership = membership
        self._rows = loader.batch_size or 1  # of one batch of this rank
        keeps = keeps_global_batch and loader.batch_size is not None
        self._place = LoaderPlace(progress, self._rows * membership.size if keeps else 0)
        membership.follow(self._place, undo=False)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        members, place = self._membership, self._place
        self._share()
        place.begin(self._order)
        members.num_passes += 1
        try:
            yield from self._batches()
            place.end()
        except GeneratorExit:  # the program leaves it
            if members.is_void:  # in an iteration that it makes again
                place.stay()
            raise
        finally:
            members.num_passes -= 1
            place.now = None

    def _batches(self) -> Iterator[Any]:
        members, place = self._membership, self._place
        sampler: Any = self._loader.sampler
        while True:
            assert place.now is not None
            generation, steps = members.generation, members.steps
            sampler.left = place.now.epoch
            for batch in DeviceLoader.__iter__(self):
                place.now.rows += self._rows
                members.has_batch = True
                yield batch
                if members.steps != steps and not members.is_void:
                    steps, place.done = members.steps, place.now.rows
                if members.generation != generation:
                    break
            else:
                if not place.now.rows:  # with `drop_last`, of an iteration that was interrupted
                    members.end_iteration()
                break
            goes_on = place.go_on()
            self._share()
            if not goes_on:
                members.stand_apart()
                break

    def _share(self) -> None:
        members, progress = self._membership, self._progress
        progress.rank, progress.num_ranks = members.rank, members.size
        sampler: Any = self._loader.sampler
        sampler.share(members.rank, members.size)
        if self._place.global_batch:
            batches: Any = self._loader.batch_sampler
            self._rows = batches.batch_size = -(-self._place.global_batch // members.size)


class LoaderPlace:
    """The place of a loader in its epoch, which a replacement takes over from another rank.

    Attributes
    ----------
    now : Pass or None
        The pass that it makes.
    done : int
        The rows of each rank in it whose steps are done.
    global_batch : int
        The rows that the batches of all ranks have together; 0 if that may change.
    """

    def __init__(self, progress: Progress, global_batch: int) -> None:
        self.global_batch = global_batch
        self.now: Pass | None = None
        self.done = 0
        self._progress = progress
        self._taken: Epoch | None = None
        self._is_elsewhere = False  # the rank from which it was taken over

    def begin(self, order: Order) -> None:
        """Begin a pass, which may be one over what the other members have left of theirs."""
        if self._taken is None:
            self.now = self._progress.begin(order)
        else:
            self.now = self._progress.begin_rest(self._taken)
        self.done, self._taken, self._is_elsewhere = 0, None, False

    def go_on(self) -> bool:
        """Begin a pass over what the former members have left; return False if they make none."""
        assert self.now is not None
        if self._is_elsewhere:
            return False
        left = self._taken or self._left(self.now)
        self.now, self.done, self._taken = self._progress.begin_rest(left), 0, None
        return True

    def stay(self) -> None:
        """Have the next pass be one over what is left of this one."""
        if self.now is not None:
            self._taken = self._taken or self._left(self.now)

    def end(self) -> None:
        """End the pass."""
        if self.now is not None:
            self._progress.end(self.now)

    def _left(self, now: Pass) -> Epoch:
        return now.epoch.after(self._progress.num_ranks, self.done) if self.done else now.epoch

    def save(self) -> dict[str, Any]:
        left = None if self.now is None else self._left(self.now).to_position()
        return {"next": self._progress.next_epoch, "left": left, "batch": self.global_batch}

    def load(self, saved: dict[str, Any]) -> None:
        self._progress.set_epoch(saved["next"])
        self.global_batch, left = saved["batch"], saved["left"]
        self._taken = None if left is None else Epoch.from_position(left)
        self._is_elsewhere = left is None

    def on_members(self, rank: int, size: int) -> None:
        """Do nothing: the loader looks for new members after each batch."""
