"""A rank's share as a dataset of Hugging Face's ``datasets``, and how Accelerate treats it."""

from __future__ import annotations

import copy
import functools
import itertools
import secrets
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from distributor.core.resources import free_memory
from distributor.core.text import counted
from distributor.data.epochs import Epoch, Order
from distributor.data.formats import row_format, table_format
from distributor.data.share import Share
from distributor.data.source import RankShare, share_description

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
