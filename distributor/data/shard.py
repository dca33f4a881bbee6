"""A rank's share of a dataset."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.data.batches import pieces_of, read_chunk
from distributor.data.epochs import Epoch, Layout, Order
from distributor.data.formats import item_format, tensor_format
from distributor.data.iteration import Dtypes, Ragged, ShareIterator
from distributor.data.options import check_callable, pass_options, whole_number
from distributor.data.share import Progress, Share
from distributor.data.source import CachedSource, Source
from distributor.data.torch_datasets import ShardDataset, ShardIterable

if TYPE_CHECKING:
    import pyarrow as pa


class DatasetShard(ShareIterator):
    """A rank's share of a dataset, as batches, as rows, or as a dataset of PyTorch.

    A function that is run with a Spark DataFrame among its arguments receives one in its place.

    Each pass over the share is the next epoch. If the run stores checkpoints, each checkpoint has
    the position in the epoch, and after a restart the first pass yields the rows that are left,
    also on another number of ranks. Ranks must use equal batch sizes: what rank 0 has read of its
    share is what each rank has read. A batch counts as read once it has been yielded. With
    ``batch_size=None`` on several ranks, the position is always the beginning of the epoch.

    Follows ``ray.data.DataIterator``:
    https://docs.ray.io/en/latest/data/api/doc/ray.data.DataIterator.html

    Parameters
    ----------
    source : Source
        The chunks of the dataset.
    layout : Layout
        How the ranks share them.
    rank : int
        This rank.
    num_ranks : int
        The number of ranks.

    Examples
    --------
    >>> def train(shard):
    ...     for epoch in range(10):
    ...         for batch in shard.iter_torch_batches(batch_size=32, shuffle=True):
    ...             step(batch["features"], batch["label"])
    """

    def __init__(self, source: Source, layout: Layout, rank: int, num_ranks: int) -> None:
        progress = Progress(source.name, layout.num_rows, rank, num_ranks)
        self._share = Share(source, layout, rank, num_ranks, progress)

    def __repr__(self) -> str:
        return f"DatasetShard({self.stats()}; columns {', '.join(self.names)})"

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self._share.source.schema.names)

    def schema(self) -> pa.Schema:
        """Return the columns, with their ``names`` and ``types``.

        Returns
        -------
        pyarrow.Schema
            The columns.

        Examples
        --------
        >>> shard.schema().names
        ['id', 'label']
        """
        return self._share.source.schema

    def count(self) -> int:
        """Return the number of rows that this rank reads in an epoch.

        Returns
        -------
        int
            The number of rows.

        Examples
        --------
        >>> shard.count()
        10
        """
        return len(self._share)

    def stats(self) -> str:
        """Describe the size of the share.

        Returns
        -------
        str
            The share's rows, and the dataset's rows and bytes.

        Examples
        --------
        >>> print(shard.stats())
        points: 10 of 10 rows for rank 0 of 1; in all 2 chunks, 160 bytes
        """
        share, layout = self._share, self._share.layout
        return (
            f"{share.source.name}: {len(share):,} of {layout.num_rows:,} rows for rank "
            f"{share.rank} of {share.num_ranks}; in all {counted(len(layout.chunk_rows), 'chunk')},"
            f" {format_bytes(int(layout.chunk_bytes.sum()))}"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass.

        Follows ``torch.utils.data.DistributedSampler.set_epoch``:
        https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler

        Parameters
        ----------
        epoch : int
            The number of the epoch, from 0. It determines the order of shuffled rows.

        Raises
        ------
        TypeError, ValueError
            If it is no integer, or negative.

        Examples
        --------
        >>> shard.set_epoch(3)
        """
        self._share.progress.set_epoch(whole_number("epoch", epoch, 0))

    def position(self) -> dict[str, Any]:
        """Return the epoch and what has been read of it, as checkpoints store it.

        Returns
        -------
        dict
            The position, for JSON.

        Examples
        --------
        >>> position = shard.position()
        """
        return self._share.progress.position()

    def materialize(self) -> DatasetShard:
        """Return this shard with its rows in memory.

        Follows ``ray.data.DataIterator.materialize``:
        https://docs.ray.io/en/latest/data/api/doc/ray.data.DataIterator.materialize.html

        Returns
        -------
        DatasetShard
            The shard, with the same epochs and position.

        Examples
        --------
        >>> shard.materialize().count()
        10
        """
        held = CachedSource(self._share.source, math.inf)
        for span in self._share.spans(Epoch(0, Order())):
            for chunk in pieces_of(span)[:, 0].tolist():
                read_chunk(held, chunk)
        shard = copy.copy(self)
        shard._share = replace(self._share, source=held)
        return shard

    def dataset(
        self,
        *,
        dtypes: Dtypes = None,
        fill: Any = None,
        ragged: Ragged = "error",
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> ShardDataset:
        """Return the share as a map-style dataset of PyTorch, for data loaders that shuffle it.

        Its items are dicts of tensors and values. It is this rank's share already: samplers, data
        loaders and trainers must not share it out again. `distributor.train.torch`'s
        ``prepare_data_loader``, ``DistributedSampler`` (and so Lightning), Accelerate and the
        Transformers ``Trainer`` leave it whole. With Lightning and a sampler without a
        ``data_source``, pass ``Trainer(use_distributed_sampler=False)``.

        It makes a tensor of each value, and reads the chunks of the rows that are asked for.
        `iter_torch_batches`, and `iterable` with a batch size, are faster, most of all for many
        columns and for a share that is larger than memory.

        Follows ``torch.utils.data.Dataset``:
        https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.Dataset

        Parameters
        ----------
        dtypes, fill, ragged
            As for `iter_torch_batches`; a nested tensor's rows are tensors.
        transform : callable, optional
            Makes the item of a row's dict.

        Returns
        -------
        torch.utils.data.Dataset
            The dataset, with ``__getitems__`` for whole batches.

        Raises
        ------
        TypeError, ValueError
            If an argument, a column's type, or a null does not allow it.

        Examples
        --------
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(shard.dataset(), batch_size=5, shuffle=True)
        >>> [len(batch["id"]) for batch in loader]
        [5, 5]
        """
        check_callable("transform", transform)
        options = self._tensor_options(dtypes, fill, ragged)
        return ShardDataset(self._share, options, transform)

    def iterable(
        self,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        dtypes: Dtypes = None,
        fill: Any = None,
        ragged: Ragged = "error",
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> ShardIterable:
        """Return the share as an iterable dataset of PyTorch, which reads it in order.

        The workers of a ``DataLoader`` read parts of it. Each pass is the next epoch. Its position
        is that of the epoch: a restart repeats the epoch from its beginning.

        Follows ``torch.utils.data.IterableDataset``:
        https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset

        Parameters
        ----------
        batch_size : int, optional
            Rows of a batch, for ``DataLoader(batch_size=None)``; by default it yields single rows.
            The number of batches is exact with workers, too.
        shuffle, seed, drop_last, dtypes, fill, ragged
            As for `iter_torch_batches`.
        transform : callable, optional
            Makes the item of a batch's or a row's dict.

        Returns
        -------
        torch.utils.data.IterableDataset
            The dataset, with ``set_epoch``.

        Raises
        ------
        TypeError, ValueError
            If an argument, a column's type, or a null does not allow it.

        Examples
        --------
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(shard.iterable(batch_size=5), batch_size=None)
        >>> [len(batch["id"]) for batch in loader]
        [5, 5]
        """
        check_callable("transform", transform)
        options = pass_options(
            batch_size=1 if batch_size is None else batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            seed=seed,
        )
        tensors = self._tensor_options(dtypes, fill, ragged)
        make = item_format if batch_size is None else tensor_format
        form = make(tensors, transform)
        return ShardIterable(self._share, options, form)
