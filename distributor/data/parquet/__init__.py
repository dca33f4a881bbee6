"""Parquet files as training data, which the ranks read themselves: a chunk is a row group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distributor.core.text import counted
from distributor.data.epochs import Layout
from distributor.data.equal_shares import Equal, check_equal
from distributor.data.parquet.files import PathLike, find_files, partitions_of, shown
from distributor.data.parquet.footers import Query, RowGroup, read_footer, schema_of, vectors_of
from distributor.data.parquet.source import ParquetFile, ParquetSource
from distributor.data.shard import DatasetShard

THREADS = 16
"""Files whose footers are read at the same time."""


def from_parquet(
    path: PathLike | Sequence[PathLike],
    *,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    equal: Equal = "pad",
    split: bool = True,
) -> DatasetShard:
    """Return this rank's share of the rows of Parquet files, without Spark.

    The ranks read the files themselves, so all of them need access to the files, which may be
    larger than the disks of the cluster. A rank reads one row group at a time, and keeps it in
    memory until it needs another one. Ranks share the rows evenly, whatever the row groups' sizes.

    Call it in the training function, or on the driver and pass what it returns as an argument of
    ``run``. The latter looks at the files once instead of in each rank.

    Parameters
    ----------
    path : str, path, or sequence of them
        Files, folders, and patterns such as ``"data/2024-*/*.parquet"``; or addresses of a file
        system that pyarrow knows, such as ``"s3://bucket/folder"``, in which patterns consist of
        ``*`` and ``**`` only. Folders are searched recursively, without files whose names begin
        with ``_`` or ``.``. Subfolders such as ``label=3``, as Spark writes them with
        ``partitionBy``, become columns.
    columns : sequence of str, optional
        The columns to read, by default all. The columns that are read must have the same types in
        all files.
    filters : pyarrow expression, or list, optional
        Which rows to read, as in `pyarrow.parquet.read_table`: an expression, a list of conditions
        such as ``[("label", "<", 5)]`` that must all hold, or a list of such lists, of which one
        must. Row groups are skipped whose statistics exclude that they contain such rows. To count
        the rows, the columns of the filter are read once when this function is called; without
        filters, only the files' footers are read.
    equal : "pad", "drop" or False, default "pad"
        How all ranks get the same number of rows, as for `from_spark`.
    split : bool, default True
        Whether the ranks share the rows. If not, each rank reads all of them.

    Returns
    -------
    DatasetShard
        The share of this rank, according to ``RANK`` and ``WORLD_SIZE``. Outside of a run, it has
        all rows.

    Raises
    ------
    FileNotFoundError
        If a path names no file.
    TypeError
        If `columns` is a string, or `split` not a bool.
    ValueError
        If a file is not a Parquet file or lacks a column, if types differ between files, if
        `columns` or `filters` name a column that does not exist, if `equal` has another value, or
        if there are no rows or fewer rows than ranks.

    Examples
    --------
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> pq.write_table(pa.table({"x": [0.5, 1.5, 2.5], "label": [0, 1, 0]}), "rows.parquet")
    >>> shard = from_parquet("rows.parquet", filters=[("label", "==", 0)])
    >>> shard.count()
    2
    """
    check_equal(equal)
    if not isinstance(split, bool):
        raise TypeError(f"split must be True or False, but is {split!r}.")
    return ParquetShard(open_parquet(path, columns, filters), equal, split)


class ParquetShard(DatasetShard):
    """A rank's share of Parquet files. A copy that is unpickled in a rank is that rank's share.

    Parameters
    ----------
    source : ParquetSource
        The row groups.
    equal, split
        As for `from_parquet`.
    """

    def __init__(self, source: ParquetSource, equal: Equal, split: bool) -> None:
        rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        layout = Layout(source.chunk_rows, source.chunk_bytes, equal, split)
        if not layout.num_rows:
            selected = "" if source.expression is None else " that the filters select"
            raise ValueError(f"{source.name} has no rows{selected}.")
        if split and layout.num_rows < num_ranks:
            raise ValueError(
                f"{source.name} has {counted(layout.num_rows, 'row')}, which is less than one for "
                f"each of the {num_ranks} ranks. Use fewer ranks."
            )
        super().__init__(source, layout, rank, num_ranks)
        self._arguments = (source, equal, split)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __copy__(self) -> ParquetShard:
        # Within a rank, a copy has the same epochs and position.
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied


def open_parquet(
    path: PathLike | Sequence[PathLike], columns: Sequence[str] | None = None, filters: Any = None
) -> ParquetSource:
    """Read the footers of Parquet files; with filters, also count the rows that they select.

    The parameters and errors are those of `from_parquet`.
    """
    found = find_files(path)
    files = [
        ParquetFile(*each)
        for folder, paths in found.folders.items()
        for each in zip(paths, partitions_of(folder, paths), strict=True)
    ]
    schema = schema_of(found.filesystem, files[0])
    names = _check_columns(columns, schema)
    query = Query(schema, None if columns is None else names, _expression(filters, schema))
    with ThreadPoolExecutor(THREADS) as threads:
        row_groups = [
            (number, group)
            for number, groups in enumerate(
                threads.map(partial(read_footer, found.filesystem, query), files)
            )
            for group in groups
        ]
    return ParquetSource(
        name=_name(path),
        schema=pa.schema([schema.field(name) for name in names]),
        vectors=vectors_of(schema) & set(names),
        chunk_rows=np.array([group.rows for _, group in row_groups], np.int64),
        chunk_bytes=np.array([group.bytes for _, group in row_groups], np.int64),
        null_counts=_null_counts(names, [group for _, group in row_groups]),
        filesystem=found.filesystem,
        files=files,
        row_groups=[(number, group.number) for number, group in row_groups],
        file_schema=schema.remove_metadata(),
        expression=query.expression,
    )


def _check_columns(columns: Sequence[str] | None, schema: pa.Schema) -> list[str]:
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, but is the string {columns!r}.")
    names = list(schema.names if columns is None else columns)
    if unknown := [name for name in names if name not in schema.names]:
        raise ValueError(
            f"There is no column {unknown[0]!r}, which is in columns={names}. The columns of the "
            f"files are {', '.join(schema.names)}."
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(f"columns must name at least one column, and each once, but is {names}.")
    return names


def _expression(filters: Any, schema: pa.Schema) -> Any:
    if filters is None:
        return None
    try:
        expression = pq.filters_to_expression(filters)
        schema.empty_table().filter(expression)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ValueError(
            f"filters={filters} cannot be applied: {str(error).splitlines()[0]}. The columns of "
            f"the files are {', '.join(schema.names)}."
        ) from error
    return expression


def _null_counts(names: Sequence[str], row_groups: Sequence[RowGroup]) -> dict[str, int] | None:
    """Return the nulls of each column; None if they are not known of all columns."""
    totals = dict.fromkeys(names, 0)
    for group in row_groups:
        for name in names:
            count = group.nulls[name]
            if count is None:
                return None
            totals[name] += count
    return totals


def _name(path: PathLike | Sequence[PathLike]) -> str:
    if isinstance(path, (str, os.PathLike)):
        return shown(path)
    first, *others = path
    return shown(first) + (f" and {counted(len(others), 'other path')}" if others else "")
