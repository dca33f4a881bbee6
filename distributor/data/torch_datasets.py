"""A rank's share as a dataset of PyTorch, which data loaders must not share out again."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    get_worker_info,
)

from distributor._compat import huggingface
from distributor._compat import torch as private_torch
from distributor.core.resources import free_memory
from distributor.core.text import counted
from distributor.data.batches import (
    CachedSource,
    Format,
    PassOptions,
    Share,
    Source,
    batches_of,
    converted,
    read_chunk,
    whole_number,
)
from distributor.data.chunk_file import open_source
from distributor.data.epochs import Epoch, Order, Span, between
from distributor.data.tensors import (
    TensorOptions,
    is_any,
    is_array,
    items,
    row_format,
    table_format,
    tensor_format,
)
from distributor.rank.import_hooks import adapt

FIRST = Epoch(0, Order())  # for what is always read from its beginning, in order
CACHE_BYTES = 256 * 1024 * 1024  # bytes of chunks that a dataset keeps for the next rows
MAX_WORKERS = 1024  # workers of a data loader that have an epoch of their own


_OF_THIS_PROCESS = secrets.token_hex(8)  # what another process has saved is no share


class RankShare:
    """A dataset of PyTorch that samplers and data loaders must not divide among the ranks."""

    def __init__(self, share: Share) -> None:
        self.share = share
        keep_shares_whole()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        keep_shares_whole()


def share_description(rows: int) -> str:
    """Return what marks a dataset of Hugging Face's as a share, of so many rows of all ranks.

    The description is in what ``map``, ``filter``, ``shuffle`` and the like make of it, too.
    """
    return f"One rank's share of {rows} rows ({_OF_THIS_PROCESS})"


def is_rank_share(dataset: object) -> bool:
    """Return whether a dataset is one rank's share, or consists of such datasets."""
    return rows_of_all_ranks(dataset) is not None


def rows_of_all_ranks(dataset: object) -> int | None:
    """Return the rows of all ranks of which a dataset has one rank's share; None if it has not."""
    match dataset:
        case RankShare():
            return dataset.share.layout.num_rows
        case Subset():
            return rows_of_all_ranks(dataset.dataset)
        case ConcatDataset():
            rows = [rows_of_all_ranks(part) for part in dataset.datasets]
            return None if None in rows else sum(filter(None, rows))
    described = getattr(getattr(dataset, "info", None), "description", None)
    found = re.search(rf"share of (\d+) rows \({_OF_THIS_PROCESS}\)", str(described))
    return int(found[1]) if found else None


class ShardDataset(RankShare, Dataset[Any]):
    """A rank's share as a map-style dataset; `DatasetShard.dataset` documents it."""

    def __init__(
        self,
        share: Share,
        options: TensorOptions,
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__(share)
        self._source = CachedSource(share.source, CACHE_BYTES)
        self._options, self._transform = options, transform
        pieces = [span.own_pieces() for span in share.spans(FIRST)]
        self._set_pieces(np.concatenate([np.empty((0, 3), np.int64), *pieces]))

    def of_all_rows(self) -> ShardDataset:
        """Return a dataset whose indices are the numbers of rows in the whole dataset.

        Only the rows that ranks of this node may read can be read.
        """
        whole = copy.copy(self)
        whole._set_pieces(self.share.layout.pieces)
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
        found = items(table, self._options)
        return found if self._transform is None else list(map(self._transform, found))

    def _checked(self, index: int) -> int:
        row, length = operator.index(index), len(self)
        if not -length <= row < length:
            raise IndexError(f"row {row} of a dataset of {length} rows")
        return row % length

    def _read(self, rows: Any) -> pa.Table:
        """Read rows, whose numbers ascend."""
        at = np.searchsorted(self._ends, rows, side="right")
        tables = [self._source.schema.empty_table()]
        for piece in np.unique(at):
            chunk, _, stop = self._pieces[piece]
            in_chunk = stop - (self._ends[piece] - rows[at == piece])
            tables.append(read_chunk(self._source, int(chunk)).take(pa.array(in_chunk)))
        return pa.concat_tables(tables).combine_chunks()


class ShardIterable(RankShare, IterableDataset[Any]):
    """A rank's share as an iterable dataset; `DatasetShard.iterable` documents it."""

    def __init__(self, share: Share, options: PassOptions, form: Format) -> None:
        super().__init__(share)
        self._options, self._form = options, form
        # Of each worker's next pass. Workers inherit the memory, so that it outlives them.
        epochs = torch.full((MAX_WORKERS,), share.progress.next_epoch, dtype=torch.int64)
        self._epochs = epochs.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        rows, size = len(self.share), self._options.batch_size or 1
        return rows // size if self._options.drop_last else -(-rows // size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        epoch = whole_number("epoch", epoch, 0)
        self.share.progress.set_epoch(epoch)
        self._epochs.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            # A framework may ask for more batches than it has trained on.
            return self.share.read(self._options, self._form, counts=False)
        epoch = Epoch(int(self._epochs[worker.id]), self._options.order)
        self._epochs[worker.id] += 1
        return self.share.read_part(worker.id, worker.num_workers, epoch, self._form, self._options)


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
            functools.partial(_rows, share),  # whoever trains on the rows skips what it had
            features=datasets.Features.from_arrow_schema(share.source.schema),
            gen_kwargs={"parts": list(range(PARTS))},
        )
    else:
        tables = share.read_part(0, 1, FIRST, table_format(None, frozenset()), PassOptions())
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
        yield from share.read_part(part, PARTS, FIRST, row_format(frozenset()), PassOptions(1))


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
    """Keep a share whole, and remember it, to recognize its rows in another dataset."""
    keep_shares_whole()
    if share.progress.rank == 0 and share.progress.num_ranks > 1 and share.layout.split:
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


def partition_loader(
    num_samples: int, batch_size: int, num_workers: int, prefetch_factor: int
) -> DataLoader[Any]:
    for name, value, least in (
        ("num_samples", num_samples, 1),
        ("batch_size", batch_size, 1),
        ("num_workers", num_workers, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, but is {value!r}.")
    if num_workers > 1:
        raise RuntimeError(
            f"num_workers is {num_workers}, but the rows of a partition are loaded by at most one "
            "process: pass 1 or 0. (DatasetShard.iterable() supports several.)"
        )
    batches = PartitionBatches(num_samples, batch_size)
    ahead = prefetch_factor if num_workers else None
    return DataLoader(batches, batch_size=None, num_workers=num_workers, prefetch_factor=ahead)


class PartitionBatches(IterableDataset[list[torch.Tensor]]):
    """Yields batches of this rank's rows, from the first again after the last one."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self._options = PassOptions(batch_size)
        self._source, layout, share, num_ranks = open_source(0)
        self._spans, self._num_samples = layout.plan(FIRST, share, num_ranks), num_samples
        options = TensorOptions(_dtypes(self._source), vectors=self._source.vectors)
        self._form = tensor_format(options)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        parts = converted(self._source, self._passes(), self._form, self._options)
        return (list(batch.values()) for _, batch in batches_of(parts, self._form))

    def _passes(self) -> Iterator[Span]:
        left, size = self._num_samples, sum(map(len, self._spans))
        while size and left > 0:
            yield from between(self._spans, 0, left)
            left -= size


def _dtypes(source: Source) -> dict[str, torch.dtype]:
    """Return what PySpark's loader makes of Python's numbers; arrays keep their type."""
    dtypes = {}
    for field in source.schema:
        if field.name in source.vectors:
            continue
        kind = field.type
        value = kind.value_type if is_array(kind) else kind
        if not is_any(value, "signed_integer", "floating"):
            raise ValueError(
                f"get_spark_partition_data_loader does not support the type {kind} of column "
                f"{field.name!r}. Pass the DataFrame to run: its ranks receive a DatasetShard."
            )
        if not is_array(kind):
            floats = pa.types.is_floating(value)
            dtypes[field.name] = torch.float64 if floats else torch.int64
    return dtypes
