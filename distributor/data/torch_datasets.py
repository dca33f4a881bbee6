"""A rank's share as a dataset of PyTorch, which data loaders must not share out again."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from distributor._compat import huggingface
from distributor._compat import torch as private_torch
from distributor.core.resources import free_memory
from distributor.core.text import counted
from distributor.data.batches import Format, pieces_of, read_chunk
from distributor.data.epochs import Epoch, Order
from distributor.data.share import PassOptions, Share, whole_number
from distributor.data.source import CachedSource, RankShare, is_rank_share, share_description
from distributor.data.tensors import TensorOptions, items, row_format, table_format
from distributor.rank.import_hooks import adapt

CACHE_BYTES = 256 * 1024 * 1024  # bytes of chunks that a dataset keeps for the next rows
MAX_WORKERS = 1024  # workers of a data loader that have an epoch of their own


class ShardDataset(Dataset[Any], RankShare):
    """A rank's share as a map-style dataset; `DatasetShard.dataset` documents it."""

    def __init__(
        self,
        share: Share,
        options: TensorOptions,
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.rows_of_all_ranks = share.layout.num_rows
        self.share = share
        self._source = CachedSource(share.source, CACHE_BYTES)
        self._options, self._transform = options, transform
        empty = np.empty((0, 3), np.int64)
        spans = share.spans(Epoch(0, Order()))
        self._set_pieces(np.concatenate([empty, *map(pieces_of, spans)]))
        keep_shares_whole()

    def of_all_rows(self) -> ShardDataset:
        """Return a dataset whose indices are the numbers of rows in the whole dataset.

        Only the rows that ranks of this node may read can be read.
        """
        whole = copy.copy(self)
        rows = self.share.layout.chunk_rows
        whole._set_pieces(np.stack([np.arange(len(rows)), np.zeros_like(rows), rows], axis=1))
        return whole

    def _set_pieces(self, pieces: Any) -> None:
        """Set the rows, as an array of chunk, start and stop of each piece."""
        self._pieces = pieces
        self._ends = np.cumsum(pieces[:, 2] - pieces[:, 1])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        [item] = self.__getitems__([index])
        return item

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        rows = np.array([self._checked(index) for index in indices], dtype=np.int64)
        order = np.argsort(rows, kind="stable")
        table = self._read(rows[order])
        if (order[1:] < order[:-1]).any():
            table = table.take(pa.array(np.argsort(order)))
        return items(table, self._options, self._transform)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        keep_shares_whole()

    def _checked(self, index: int) -> int:
        row, length = operator.index(index), len(self)
        if not -length <= row < length:
            raise IndexError(f"row {row} of a dataset of {length} rows")
        return row % length

    def _read(self, rows: Any) -> pa.Table:
        """Read rows, whose numbers ascend."""
        at = np.searchsorted(self._ends, rows, side="right")
        chunks, _, stops = self._pieces[at].T
        in_chunk = stops - (self._ends[at] - rows)
        firsts = np.flatnonzero(np.diff(at, prepend=-1))
        tables = [
            read_chunk(self._source, int(chunks[part[0]])).take(pa.array(in_chunk[part]))
            for part in np.split(np.arange(len(rows)), firsts[1:])
            if len(part)
        ]
        return pa.concat_tables(tables or [self._source.schema.empty_table()]).combine_chunks()


class ShardIterable(IterableDataset[Any], RankShare):
    """A rank's share as an iterable dataset; `DatasetShard.iterable` documents it."""

    def __init__(self, share: Share, options: PassOptions, form: Format) -> None:
        self.rows_of_all_ranks = share.layout.num_rows
        self._share, self._options, self._form = share, options, form
        self._batch_size = options.batch_size or 1
        # Of each worker's next pass. Workers inherit the memory, so that it outlives them.
        epochs = torch.full((MAX_WORKERS,), share.progress.next_epoch, dtype=torch.int64)
        self._epochs = epochs.share_memory_()  # type: ignore[no-untyped-call]
        keep_shares_whole()

    def __len__(self) -> int:
        rows, size = len(self._share), self._batch_size
        return rows // size if self._options.drop_last else -(-rows // size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        epoch = whole_number("epoch", epoch, 0)
        self._share.progress.set_epoch(epoch)
        self._epochs.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            # A framework may ask for more batches than it has trained on.
            return self._share.read(self._options, self._form, counts=False)
        return self._of_worker(worker.id, worker.num_workers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        keep_shares_whole()

    def _of_worker(self, worker: int, num_workers: int) -> Iterator[Any]:
        """Begin a pass over a worker's part."""
        epoch = Epoch(int(self._epochs[worker]), self._options.order)
        self._epochs[worker] += 1
        return self._share.read_part(
            worker, num_workers, epoch, self._form, self._batch_size, self._options.drop_last
        )


@functools.cache
def keep_shares_whole() -> None:
    """Change what would share a share out again, so that most of its rows would not be read."""
    change = functools.partial(private_torch.keep_shares_whole, is_share=is_rank_share)
    adapt("torch.utils.data.distributed", change)
    change = functools.partial(
        huggingface.keep_shares_whole, is_share=is_rank_share, evened=evened, question=question
    )
    adapt("accelerate.accelerator", change)


PARTS = 16  # of a stream, for the workers of a data loader
FIRST = Epoch(0, Order())  # every pass is this one: who trains on the rows skips what it had
_divided: list[tuple[int, str]] = []  # on rank 0, the rows and the name of each share of several


def to_huggingface(share: Share, streaming: bool | None) -> Any:
    """Return the share; `DatasetShard.to_huggingface` documents it."""
    try:
        import datasets
    except ImportError as error:
        raise ModuleNotFoundError(
            "to_huggingface() needs Hugging Face's datasets: pip install datasets, in the "
            "environment of the ranks.",
            name=error.name,
        ) from error
    layout = share.layout
    if streaming is None:
        size = int(layout.chunk_bytes.sum()) * len(share) / max(1, layout.num_rows)
        streaming = size > free_memory() / 4
    if streaming:
        dataset = datasets.IterableDataset.from_generator(
            functools.partial(_rows, share),
            features=datasets.Features.from_arrow_schema(share.source.schema),
            gen_kwargs={"parts": list(range(PARTS))},
        )
    else:
        tables = share.read_part(0, 1, FIRST, table_format(None, frozenset()), None)
        # Without a fingerprint of its own, all of it would be pickled to make one.
        dataset = datasets.Dataset(
            pa.concat_tables([share.source.schema.empty_table(), *tables]),
            fingerprint=secrets.token_hex(8),
        )
    if layout.split:  # otherwise each rank has all rows, for Accelerate to divide
        dataset.info.description = share_description(layout.num_rows)
    return dataset


def _rows(share: Share, parts: list[int]) -> Iterator[dict[str, Any]]:
    for part in parts:
        yield from share.read_part(part, PARTS, FIRST, row_format(frozenset()), 1)


class Repeated(BatchSampler):
    """The batches of a sampler, again from its beginning until there are as many as wanted."""

    def __init__(self, batch_sampler: BatchSampler, batches: int) -> None:
        self.batch_sampler, self._batches = batch_sampler, batches  # Accelerate's own name
        self.sampler = batch_sampler.sampler
        self.batch_size, self.drop_last = batch_sampler.batch_size, batch_sampler.drop_last

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        again = (batch for _ in itertools.count() for batch in self.batch_sampler)
        return itertools.islice(again, self._batches)


def evened(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader with as many batches as that of the rank with the most.

    After a filter, or when texts are packed, ranks have different numbers of rows, and a rank with
    fewer batches would leave the others waiting. All ranks call this together, as they prepare it;
    not for our own datasets, whose shares are equal, and which one rank may prepare alone.
    """
    sampler = loader.batch_sampler
    is_other = isinstance(loader.dataset, (RankShare, IterableDataset))
    if is_other or not isinstance(sampler, BatchSampler) or not dist.is_initialized():
        return loader
    lengths: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(lengths, len(sampler))
    if len(set(lengths)) == 1:
        return loader
    if 0 in lengths:
        raise ValueError(
            f"Rank {lengths.index(0)} has no rows to train on, and others have: batches by rank "
            f"are {lengths}. Filter the DataFrame before the run instead, or use "
            "from_spark(df, split=False) and a dataset of all rows."
        )
    even = copy.copy(loader)
    # A DataLoader refuses that this attribute is set.
    even.__dict__["batch_sampler"] = Repeated(sampler, max(lengths))
    return even


def note_share(share: Share) -> None:
    """Remember a share of several, to recognize its rows in another dataset."""
    if share.rank == 0 and share.num_ranks > 1 and share.layout.split:
        _divided.append((len(share), share.source.name))


def question(dataset: Any, num_processes: int | None) -> None:
    """Ask once whether the dataset that is about to be divided has one rank's rows already."""
    try:
        rows = len(dataset)
    except TypeError:  # a stream
        rows = None
    names = [name for count, name in _divided if rows in (None, count)]
    if not names or (num_processes or 1) == 1:
        return
    _divided.clear()
    print(
        f"distributor: Accelerate divides a dataset of {counted(rows, 'row') if rows else 'rows'} "
        f"among {num_processes} processes. Are these the rows of this rank's share of {names[0]}? "
        f"Then only one in {num_processes} is trained on: pass {names[0]}.to_huggingface(), which "
        "is not divided again, or pass from_spark(df, split=False) to the run.",
        flush=True,
    )
