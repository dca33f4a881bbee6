"""A rank's share of a dataset, in the names of Ray's ``DataIterator``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from distributor.core.resources import format_bytes
from distributor.core.text import counted, table_of
from distributor.data.batches import (
    Batches,
    PassOptions,
    Share,
    Source,
    check_bool,
    pass_options,
    whole_number,
)
from distributor.data.epochs import Layout, Progress
from distributor.data.tensors import (
    Dtypes,
    Ragged,
    TensorOptions,
    check_columns,
    collated_format,
    item_format,
    pinned,
    row_format,
    table_format,
    tensor_format,
)
from distributor.data.torch_datasets import (
    ShardDataset,
    ShardIterable,
    note_share,
    to_huggingface,
)
from distributor.rank.context import device as rank_device
from distributor.rank.context import move

if TYPE_CHECKING:
    import pyarrow as pa


class DatasetShard:
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
        self._share = Share(source, layout, progress)
        note_share(self._share)

    def __repr__(self) -> str:
        return f"DatasetShard({self.stats()}; columns {', '.join(self.names)})"

    def _repr_html_(self) -> str:
        columns = {field.name: str(field.type) for field in self.schema()}
        return table_of(f"DatasetShard {self.stats()}", columns)

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
        share, layout, progress = self._share, self._share.layout, self._share.progress
        return (
            f"{share.source.name}: {len(share):,} of {layout.num_rows:,} rows for rank "
            f"{progress.rank} of {progress.num_ranks}; in all "
            f"{counted(len(layout.chunk_rows), 'chunk')}, "
            f"{format_bytes(int(layout.chunk_bytes.sum()))}"
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
        shard = copy.copy(self)
        shard._share = self._share.in_memory()
        return shard

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: Dtypes = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        fill: Any = None,
        ragged: Ragged = "error",
    ) -> Batches[Any]:
        """Return the share as batches of tensors.

        Follows ``ray.data.DataIterator.iter_torch_batches``:
        https://docs.ray.io/en/latest/data/api/doc/ray.data.DataIterator.iter_torch_batches.html

        Parameters
        ----------
        prefetch_batches : int, default 1
            Batches that a thread prepares before they are wanted; 0 prepares each when it is.
        batch_size : int or None, default 256
            Rows of a batch. None yields as many as are read at once, up to about 32 MiB.
        dtypes : torch.dtype or mapping of str to torch.dtype, optional
            The dtype of all tensors, or of columns; by default that of the column's type.
        device : str or torch.device, default "auto"
            Where the tensors are; "auto" is this rank's device. They are copied to a GPU from
            pinned memory, asynchronously.
        collate_fn : callable, optional
            Makes the batch of a dict of NumPy arrays, or, if it is an instance of Ray's
            ``ArrowBatchCollateFn`` or ``PandasBatchCollateFn``, of a table or a DataFrame. Its
            tensors are copied to `device`. It is called in the thread.
        drop_last : bool, default False
            Whether to drop the last batch if it is smaller.
        local_shuffle_buffer_size : int, optional
            Shuffle the rows within blocks of so many; at least `batch_size`.
        local_shuffle_seed : int, optional
            Another name of `seed`, which it overrides. Without either, the order is that of seed 0
            (in Ray it is random).
        pin_memory : bool, default False
            Whether tensors that stay on the CPU are in pinned memory, if there is a GPU.
        shuffle : bool, default False
            Whether to shuffle the rows of the share, in another order each epoch. Chunks are
            shuffled, and the rows within windows of several chunks.
        seed : int, default 0
            Determines the order, together with the epoch and the rank.
        fill : number or mapping of str to object, optional
            What replaces nulls, in all columns of numbers or in those named; by default nulls are
            an error.
        ragged : "error", "nested" or "list", or mapping of str to these, default "error"
            What arrays of unequal length become: an error, a nested tensor, or a list of tensors.

        Returns
        -------
        iterable of dict of str to torch.Tensor
            The batches. Each iteration over it is the next epoch.

        Raises
        ------
        TypeError, ValueError
            If an argument, a column's type, or a null does not allow it.
        DistributorError
            In an iteration, if rows are not on this node.

        Examples
        --------
        >>> for batch in shard.iter_torch_batches(batch_size=4, device="cpu"):
        ...     print(batch["id"])
        tensor([0, 1, 2, 3])
        tensor([4, 5, 6, 7])
        tensor([8, 9])
        """
        options = pass_options(
            batch_size=batch_size,
            drop_last=drop_last,
            prefetch_batches=prefetch_batches,
            shuffle=shuffle,
            seed=seed,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        check_bool("pin_memory", pin_memory)
        _check_collate_fn(collate_fn, dtypes, fill)
        target = _checked_device(device)
        if collate_fn is None:
            form = tensor_format(self._tensor_options(dtypes, fill, ragged))
        else:
            form = collated_format(collate_fn, self._share.source.vectors)
        if torch.cuda.is_available() and (pin_memory or target.type == "cuda"):
            form = pinned(form)
        return Batches(partial(_on_device, partial(self._share.read, options, form), target))

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> Batches[Any]:
        """Return the share as batches of arrays, DataFrames or tables.

        Follows ``ray.data.DataIterator.iter_batches``:
        https://docs.ray.io/en/latest/data/api/doc/ray.data.DataIterator.iter_batches.html

        Parameters
        ----------
        prefetch_batches, batch_size, drop_last, local_shuffle_buffer_size, local_shuffle_seed, \
shuffle, seed
            As for `iter_torch_batches`.
        batch_format : "default", "numpy", "pandas", "pyarrow" or None, default "default"
            What a batch is: a dict of NumPy arrays ("default" and "numpy"), a pandas DataFrame, or
            an Arrow table ("pyarrow" and None).

        Returns
        -------
        iterable
            The batches. Each iteration over it is the next epoch.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong type or value.
        DistributorError
            In an iteration, if rows are not on this node.

        Examples
        --------
        >>> [len(batch["id"]) for batch in shard.iter_batches(batch_size=4)]
        [4, 4, 2]
        """
        options = pass_options(
            batch_size=batch_size,
            drop_last=drop_last,
            prefetch_batches=prefetch_batches,
            shuffle=shuffle,
            seed=seed,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        form = table_format(batch_format, self._share.source.vectors)
        return Batches(partial(self._share.read, options, form))

    def iter_rows(self) -> Batches[dict[str, Any]]:
        """Return the share's rows as dicts of Python's values, in order.

        Follows ``ray.data.DataIterator.iter_rows``:
        https://docs.ray.io/en/latest/data/api/doc/ray.data.DataIterator.iter_rows.html

        Returns
        -------
        iterable of dict of str to object
            The rows. Each iteration over it is the next epoch.

        Examples
        --------
        >>> next(iter(shard.iter_rows()))
        {'id': 0, 'label': 0.0}
        """
        form = row_format(self._share.source.vectors)
        return Batches(partial(self._share.read, PassOptions(batch_size=1), form))

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
        _check_callable("transform", transform)
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
        _check_callable("transform", transform)
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

    def to_huggingface(self, *, streaming: bool | None = None) -> Any:
        """Return the share as a dataset of Hugging Face's ``datasets``, for its trainers.

        Its rows are this rank's. Accelerate, and so the Transformers ``Trainer`` and TRL's, leave
        it whole, also what ``map``, ``filter`` and ``shuffle`` make of it; they would divide a
        dataset made of `iter_rows` once more, and train on a fraction of the rows. If a filter or
        packed texts leave ranks with different numbers of batches, those with fewer repeat some.
        With ``from_spark(df, split=False)`` it has all rows, which they divide. After a restart a
        ``Trainer`` that resumes skips what it had trained on.

        Follows ``datasets.Dataset`` and ``datasets.IterableDataset``:
        https://huggingface.co/docs/datasets/package_reference/main_classes

        Parameters
        ----------
        streaming : bool, optional
            Whether to read the rows as they are wanted, with the workers of a data loader if there
            are any, instead of holding them in memory; by default if they take more than a quarter
            of the free memory. A ``Trainer`` then needs ``max_steps``.

        Returns
        -------
        datasets.Dataset or datasets.IterableDataset
            The rows, in order.

        Raises
        ------
        ModuleNotFoundError
            If ``datasets`` is not installed.
        DistributorError
            If rows are not on this node.

        Examples
        --------
        >>> shard.to_huggingface().column_names  # doctest: +SKIP
        ['id', 'label']
        """
        if streaming is not None:
            check_bool("streaming", streaming)
        return to_huggingface(self._share, streaming)

    def _tensor_options(self, dtypes: Dtypes, fill: Any, ragged: Ragged) -> TensorOptions:
        source = self._share.source
        options = TensorOptions(dtypes, fill, ragged, source.vectors)
        check_columns(source.schema, options, source.null_counts, source.name)
        return options


def _on_device(begin: Callable[[], Iterator[Any]], target: torch.device) -> Iterator[Any]:
    """Copy batches to a GPU, in this thread, so that its stream waits for the copies."""
    if target.type == "cpu":
        return begin()
    return (move(batch, target) for batch in begin())


def _check_callable(name: str, value: Callable[..., Any] | None) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, but is {value!r}.")


def _check_collate_fn(
    collate_fn: Callable[[Any], Any] | None,
    dtypes: Dtypes,
    fill: Any,
) -> None:
    """Check that nothing is asked of the conversion to tensors that `collate_fn` replaces."""
    _check_callable("collate_fn", collate_fn)
    for name, value in (("dtypes", dtypes), ("fill", fill)):
        if collate_fn is not None and value is not None:
            raise ValueError(
                f"{name} and collate_fn exclude each other: collate_fn itself converts the NumPy "
                "arrays that it is called with."
            )


def _checked_device(device: Any) -> torch.device:
    """Return the device that an argument names; "auto" is this rank's."""
    if device == "auto":
        return rank_device()
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device must be "auto" or a device of torch: {error}') from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(found)!r}, but torch finds no GPU here.")
    return found
