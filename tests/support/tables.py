"""Datasets in memory, whose chunks are Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from distributor.data.epochs import Equal, Layout
from distributor.data.shard import DatasetShard


@dataclass(frozen=True)
class TableSource:
    """A dataset of tables, its chunks; those that are missing cannot be read."""

    tables: Sequence[pa.Table]
    name: str = "points"
    missing: frozenset[int] = frozenset()
    vectors: frozenset[str] = frozenset()

    @property
    def schema(self) -> pa.Schema:
        return self.tables[0].schema

    @property
    def chunk_rows(self) -> Any:
        return np.array([table.num_rows for table in self.tables], dtype=np.int64)

    @property
    def chunk_bytes(self) -> Any:
        return np.array([table.nbytes for table in self.tables], dtype=np.int64)

    @property
    def null_counts(self) -> Mapping[str, int]:
        whole = pa.concat_tables(self.tables)
        return {name: whole[name].null_count for name in whole.column_names}

    def release(self, chunk: int) -> None: ...

    def read(self, chunk: int) -> pa.Table:
        if chunk in self.missing:
            raise LookupError(chunk)
        return self.tables[chunk]


def points(sizes: Sequence[int]) -> TableSource:
    """Return a dataset of chunks with so many rows each, whose `id` is the number of the row."""
    ids = np.arange(sum(sizes))
    whole = pa.table({"id": ids, "label": ids / 2})
    begins = np.cumsum([0, *sizes])
    return TableSource([whole.slice(at, size) for at, size in zip(begins, sizes, strict=False)])


def shard_of(
    source: TableSource,
    rank: int = 0,
    num_ranks: int = 1,
    equal: Equal = False,
    split: bool = True,
) -> DatasetShard:
    """Return a rank's share of a dataset."""
    layout = Layout(source.chunk_rows, source.chunk_bytes, equal, split)
    return DatasetShard(source, layout, rank, num_ranks)
