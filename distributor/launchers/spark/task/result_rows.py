"""The rows of a task: what did not reach the driver over the link."""

from __future__ import annotations

import functools
import pickle
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from distributor.core.resources import format_bytes
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import PART_BYTES, Value
from distributor.wire.messages import Output

if TYPE_CHECKING:
    import pyarrow as pa

ROW_SCHEMA = "rank int, part int, data binary"
"""The rows' schema, as Spark writes it. A value is split into parts, numbered from 0."""
REPORTS_PART = -1
"""The part number of a row that has `Output` messages instead of a part of a value."""


class UnsentReports:
    """Reports that no link could carry, compressed in a file, until they become rows."""

    def __init__(self) -> None:
        self._waiting: list[Output] = []
        self._waiting_bytes = 0
        self._rank = 0
        self._sizes: list[int] = []  # of the pieces in the file
        self._left_out = 0

    def add(self, report: Output) -> None:
        """Add a report, which never fails: if the disk is full, the report is left out."""
        self._rank = report.rank
        self._waiting.append(report)
        self._waiting_bytes += len(report.data)
        if self._waiting_bytes > PART_BYTES:
            self._write()

    def rows(self, room: int) -> Iterator[pa.RecordBatch]:
        """Yield the reports, in order, as rows of at most so many bytes in all.

        If that is too little, the last row has a message about it that the driver shows.
        """
        if self._waiting:
            self._write()
        if self._sizes:
            self._file.seek(0)
        for number, size in enumerate(self._sizes):
            if size > room:
                self._left_out += sum(self._sizes[number:])
                break
            room -= size
            yield _row(self._rank, REPORTS_PART, self._file.read(size))
        if self._left_out:
            text = (
                f"distributor: {format_bytes(self._left_out)} of compressed reports of this node "
                "are missing: it had no link to the driver, and neither its disk nor Spark has "
                "room for them (spark.driver.maxResultSize, and a quarter of spark.driver.memory "
                "and spark.executor.memory). Make the driver reachable from the executors "
                "(hub_address), or report less often.\n"
            )
            message = Output(self._rank, "stderr", text.encode())
            yield _row(self._rank, REPORTS_PART, packed([message]))

    @functools.cached_property
    def _file(self) -> BinaryIO:
        return tempfile.TemporaryFile(buffering=0)

    def _write(self) -> None:
        piece = packed(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        try:
            self._file.seek(sum(self._sizes))
            is_written = self._file.write(piece) == len(piece)
        except OSError:
            is_written = False
        if is_written:
            self._sizes.append(len(piece))
        else:
            self._left_out += len(piece)


def packed(reports: list[Output]) -> bytes:
    """Return reports as the data of a row."""
    return zlib.compress(pickle.dumps(reports), 1)


def unpacked(data: bytes) -> list[Output]:
    """Return the reports of a row."""
    reports: list[Output] = pickle.loads(zlib.decompress(data))
    return reports


def rows_of(values: Iterable[Value]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of values."""
    for value in values:
        for part, data in enumerate(value.parts()):
            yield _row(value.rank, part, bytes(data))


def _row(rank: int, part: int, data: bytes) -> pa.RecordBatch:
    import pyarrow as pa

    schema = pa.schema([("rank", pa.int32()), ("part", pa.int32()), ("data", pa.binary())])
    columns: list[list[Any]] = [[rank], [part], [data]]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def late_output_in(rows: Iterable[Any]) -> Iterator[Output]:
    """Yield what ranks reported that no link could carry."""
    for row in rows:
        if row.part == REPORTS_PART:
            yield from unpacked(row.data)


def values_in(rows: Iterable[Any]) -> dict[int, Value]:
    """Return the values among rows, by rank, each put together from its parts."""
    values: dict[int, Value] = {}
    parts = (row for row in rows if row.part != REPORTS_PART)
    for row in sorted(parts, key=lambda row: (row.rank, row.part)):
        if row.rank not in values:
            values[row.rank] = Value(row.rank, anonymous_file())
        values[row.rank].file.write(row.data)
    return values
