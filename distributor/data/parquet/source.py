"""The row groups of Parquet files as a dataset's chunks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from distributor.core.text import is_unicode

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class ParquetFile:
    """A file, and the values of the columns that the names of its folders contain."""

    path: str
    partition: Mapping[str, pa.Scalar]

    def fragment(self, filesystem: Any, row_groups: list[int] | None = None) -> Any:
        """Return all of the file, or some row groups, for pyarrow to read."""
        # pyarrow finds a file whose name is not in UTF-8 only by its bytes.
        file = (
            (self.path, filesystem)
            if is_unicode(self.path)
            else (filesystem.open_input_file(os.fsencode(self.path)),)
        )
        return pads.ParquetFileFormat().make_fragment(
            *file,
            partition_expression=self._expression(),
            row_groups=row_groups,
        )

    def _expression(self) -> Any:
        conditions = [
            pc.field(name) == value if value.is_valid else pc.field(name).is_null()
            for name, value in self.partition.items()
        ]
        return reduce(and_, conditions) if conditions else None


@dataclass(eq=False)
class ParquetSource:
    """The row groups of Parquet files, as a `Source`. It can be pickled, and is small then.

    Parameters
    ----------
    name, schema, vectors, chunk_rows, chunk_bytes, null_counts
        As in `Source`.
    filesystem : FileSystem
        The file system of the files.
    files : list of ParquetFile
        The files.
    row_groups : list of (int, int)
        Of each chunk, the file and the number of the row group.
    file_schema : pyarrow.Schema
        All columns of the files.
    expression : pyarrow.compute.Expression or None
        Which rows are read.
    """

    name: str
    schema: pa.Schema
    vectors: frozenset[str]
    chunk_rows: NDArray[np.int64]
    chunk_bytes: NDArray[np.int64]
    null_counts: Mapping[str, int] | None
    filesystem: Any
    files: list[ParquetFile]
    row_groups: list[tuple[int, int]]
    file_schema: pa.Schema
    expression: Any
    _last: tuple[int, pa.Table] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}

    def release(self, chunk: int) -> None:
        """Do nothing: the next row group that is read replaces it."""

    def read(self, chunk: int) -> pa.Table:
        """Read a row group, unless it is the one that was read last.

        Raises
        ------
        RuntimeError
            If the file has changed since its footer was read.
        """
        if (last := self._last) is not None and last[0] == chunk:
            return last[1]
        last = self._last = None  # so that only one is in memory
        file, row_group = self.row_groups[chunk]
        table = (
            self.files[file]
            .fragment(self.filesystem, [row_group])
            .to_table(schema=self.file_schema, columns=self.schema.names, filter=self.expression)
        )
        if len(table) != self.chunk_rows[chunk]:
            raise RuntimeError(
                f"{self.files[file].path} has changed since the run began: row group {row_group} "
                f"had {self.chunk_rows[chunk]} rows, and has {len(table)} now."
            )
        self._last = (chunk, table)
        return table
