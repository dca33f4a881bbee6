"""The batches of `get_spark_partition_data_loader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset

from distributor.data.batches import read_chunk
from distributor.data.chunk_file import open_source
from distributor.data.epochs import Epoch, Order
from distributor.data.source import Source
from distributor.data.tensors import TensorOptions, to_tensors


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
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._source, layout, share, num_ranks = open_source(0)
        self._spans = layout.plan(Epoch(0, Order()), share, num_ranks)
        self._options = TensorOptions(
            dtypes=_dtypes(self._source), fill=None, ragged="error", vectors=self._source.vectors
        )

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        left = self._num_samples
        waiting: list[pa.Table] = []
        rows = 0
        for table in self._tables():
            waiting.append(table)
            rows += table.num_rows
            while rows >= min(self._batch_size, left):
                joined = pa.concat_tables(waiting)
                size = min(self._batch_size, left)
                tensors = to_tensors(joined.slice(0, size), self._options)
                yield list(tensors.values())
                waiting = [joined.slice(size)]
                rows, left = rows - size, left - size
                if not left:
                    return

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the rows, endlessly."""
        while True:
            for span in self._spans:
                for chunk, start, stop in span.pieces.tolist():
                    yield read_chunk(self._source, chunk).slice(start, stop - start)
                    self._source.release(chunk)


def _dtypes(source: Source) -> dict[str, torch.dtype]:
    """Return what PySpark's loader makes of Python's numbers; arrays keep their type."""
    dtypes = {}
    for field in source.schema:
        if field.name in source.vectors:
            continue
        kind = field.type
        is_array = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        value = kind.value_type if is_array else kind
        if not (pa.types.is_signed_integer(value) or pa.types.is_floating(value)):
            raise ValueError(
                f"get_spark_partition_data_loader does not support the type {kind} of column "
                f"{field.name!r}. Pass the DataFrame to run: its ranks receive a DatasetShard."
            )
        if not is_array:
            floats = pa.types.is_floating(value)
            dtypes[field.name] = torch.float64 if floats else torch.int64
    return dtypes
