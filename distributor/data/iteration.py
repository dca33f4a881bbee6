"""The passes over a share, under the names of Ray's ``DataIterator``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch

from distributor.data.batches import Batches
from distributor.data.formats import collated_format, row_format, table_format, tensor_format
from distributor.data.options import (
    PassOptions,
    check_batch_format,
    check_bool,
    check_collate_fn,
    checked_device,
    pass_options,
)
from distributor.data.share import Share
from distributor.data.tensors import TensorOptions, check_columns
from distributor.data.tensors.options import Ragged as RaggedKind
from distributor.rank.devices import move, pin

Dtypes: TypeAlias = "torch.dtype | Mapping[str, torch.dtype] | None"
Ragged: TypeAlias = "RaggedKind | Mapping[str, RaggedKind]"


class ShareIterator:
    """Passes over a share, each of which is the next epoch."""

    _share: Share

    def _tensor_options(self, dtypes: Dtypes, fill: Any, ragged: Ragged) -> TensorOptions:
        """Check how columns become tensors."""
        source = self._share.source
        options = TensorOptions(dtypes, fill, ragged, source.vectors)
        check_columns(source.schema, options, source.null_counts, source.name)
        return options

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
        check_collate_fn(collate_fn, dtypes, fill)
        target = checked_device(device)
        pins = torch.cuda.is_available() and (pin_memory or target.type == "cuda")
        finish = pin if pins else None
        if collate_fn is None:
            form = tensor_format(self._tensor_options(dtypes, fill, ragged), finish=finish)
        else:
            form = collated_format(collate_fn, self._share.source.vectors, finish)
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
        check_batch_format(batch_format)
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

    def iter_tf_batches(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError."""
        _refuse("iter_tf_batches", 'iter_batches(batch_format="numpy") and tf.convert_to_tensor')

    def to_tf(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError."""
        _refuse("to_tf", 'tf.data.Dataset.from_generator with iter_batches(batch_format="numpy")')

    def iter_jax_batches(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError."""
        _refuse("iter_jax_batches", 'iter_batches(batch_format="numpy") and jax.numpy.asarray')

    def to_torch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: Ray has deprecated it."""
        _refuse("to_torch", "iter_torch_batches, iterable or dataset")


def _refuse(name: str, alternative: str) -> NoReturn:
    raise NotImplementedError(f"DatasetShard has no {name}. Use {alternative} instead.")


def _on_device(begin: Callable[[], Iterator[Any]], target: torch.device) -> Iterator[Any]:
    """Copy batches to a GPU, in this thread, so that its stream waits for the copies."""
    if target.type == "cpu":
        return begin()
    return (move(batch, target) for batch in begin())
