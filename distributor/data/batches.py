"""Reads windows of a dataset, makes batches of them, and prepares those ahead in a thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distributor.data.epochs import Span
from distributor.data.source import Source
from distributor.errors import DistributorError

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
S = TypeVar("S", bound=Sized)
# Pieces of a table that are not copied into one, although each takes time when it is sliced.
MAX_PIECES = 64
# Bytes that are converted at once: the C library reuses the memory of smaller arrays.
PART_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Format:
    """How tables become batches."""

    convert: Callable[[pa.Table], Any]
    # Returns the batch from one row to another of a converted table, without much work. By default
    # each batch is converted by itself.
    cut: Callable[[Any, int, int], Any] | None = None
    max_rows: int | None = None  # to convert at once, if they are more than a batch


@dataclass(frozen=True)
class Converted:
    """Batches that have been converted at once."""

    value: Any  # what a `Format` has made of them
    rows: int
    batch_size: int  # the last may have fewer rows

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)


class Batches(Generic[T]):
    """Batches that can be iterated over again: each pass is the next epoch."""

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[T]:
        return self._begin()


def read_chunk(source: Source, chunk: int) -> pa.Table:
    try:
        found = source.read(chunk)
    except LookupError as error:
        raise DistributorError(
            f"Rows of {source.name} are not on this node. The driver sends each node the rows that "
            "its ranks have left to read, but it did not know the checkpoint's position, because "
            "it could not read storage_path. Restart the run on the number of ranks that stored "
            "the checkpoint, or with a storage_path that the driver can read."
        ) from error
    return found if isinstance(found, pa.Table) else pa.Table.from_batches([found])


def read_window(source: Source, span: Span) -> pa.Table:
    """Read the rows of a span, in its order."""
    order = span.permutation()
    pieces = pieces_of(span) if order is None else span.pieces  # all: rows may be anywhere
    tables = [
        read_chunk(source, chunk).slice(start, stop - start)
        for chunk, start, stop in pieces.tolist()
    ]
    table = pa.concat_tables(tables)
    if order is None:
        return table if len(tables) <= MAX_PIECES else table.combine_chunks()
    return reordered(table, order)


def pieces_of(span: Span) -> NDArray[np.int64]:
    """Return the pieces of the window of a span whose rows are in order, cut to its rows."""
    chunks, starts, stops = span.pieces.T
    lengths = stops - starts
    begins = np.cumsum(lengths) - lengths
    first = np.clip(span.begin - begins, 0, lengths)
    last = np.clip(span.end - begins, 0, lengths)
    within = np.stack([chunks, starts + first, starts + last], axis=1)
    pieces: NDArray[np.int64] = within[first < last]
    return pieces


def converted(
    source: Source, spans: Sequence[Span], form: Format, batch_size: int | None, drop_last: bool
) -> Iterator[Converted]:
    windows = _windows(source, spans)
    tables = windows if batch_size is None else _regrouped(windows, batch_size)
    return converted_tables(tables, form, batch_size, drop_last)


def rows_of_part(rows: int, size: int) -> int:
    """Return how many rows have `PART_BYTES`, of rows with so many bytes; at least one."""
    return max(1, int(rows * PART_BYTES / max(1, size)))


def converted_tables(
    tables: Iterable[pa.Table], form: Format, batch_size: int | None, drop_last: bool = False
) -> Iterator[Converted]:
    """Convert each table to batches, many of them at once if the format allows."""
    for table in tables:
        size = batch_size or table.num_rows
        if drop_last:
            table = table.slice(0, table.num_rows // size * size)
        at_once = size
        if form.cut is not None:
            fitting = rows_of_part(table.num_rows, table.nbytes)
            at_once = min(form.max_rows or max(table.num_rows, 1), fitting)
        step = -(-at_once // size) * size
        for start in range(0, table.num_rows, step):
            part = table.slice(start, step)
            yield Converted(form.convert(part), part.num_rows, size)


def batches_of(parts: Iterable[Converted], form: Format) -> Iterator[tuple[int, Any]]:
    """Yield batches, and the number of rows of each."""
    for part in parts:
        for start in range(0, part.rows, part.batch_size):
            stop = min(start + part.batch_size, part.rows)
            batch = part.value if form.cut is None else form.cut(part.value, start, stop)
            yield stop - start, batch


def _windows(source: Source, spans: Iterable[Span]) -> Iterator[pa.Table]:
    """Read spans; a chunk's memory is freed once what was read with it has been converted."""
    for span in spans:
        yield read_window(source, span)
        for chunk in span.pieces[:, 0].tolist():
            source.release(chunk)


def _regrouped(windows: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield tables of a multiple of so many rows; only the last may have fewer left."""
    rest: list[pa.Table] = []
    missing = rows
    for window in windows:
        if rest:  # a batch that began in an earlier window
            begin, window = window.slice(0, missing), window.slice(missing)
            rest.append(begin)
            missing -= begin.num_rows
            if missing:
                continue
            yield pa.concat_tables(rest)
            rest, missing = [], rows
        whole = window.num_rows // rows * rows
        if whole:
            yield window.slice(0, whole)
        if whole < window.num_rows:
            rest = [window.slice(whole)]
            missing = rows - rest[0].num_rows
    if rest:
        yield pa.concat_tables(rest)


def reordered(table: pa.Table, order: NDArray[np.int64]) -> pa.Table:
    """Return the rows of a table that have these numbers."""
    indices = pa.array(order)
    columns = [_taken(whole(column), indices) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without a copy if it is one."""
    if column.num_chunks == 1:
        return column.chunk(0)
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):  # an array would have too many bytes
        return combined.chunk(0) if combined.num_chunks == 1 else combined
    return combined


def _taken(column: pa.Array | pa.ChunkedArray, indices: pa.Array) -> pa.Array | pa.ChunkedArray:
    if column.null_count or not len(column):
        return column.take(indices)
    if isinstance(column, pa.StructArray):
        parts = [_taken(part, indices) for part in column.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(column.type))
    if isinstance(column, (pa.ListArray, pa.LargeListArray)):
        bounds = pc.min_max(pc.list_value_length(column))
        size = bounds["min"].as_py()
        if size == bounds["max"].as_py() and size > 0:
            # Arrow takes arrays of equal length many times faster if the type says so.
            fixed = pa.FixedSizeListArray.from_arrays(column.flatten(), size)
            return _with_type(fixed.take(indices), column.type, size)
    return column.take(indices)


def _with_type(rows: pa.FixedSizeListArray, kind: pa.DataType, size: int) -> pa.Array:
    """Return arrays of equal length as arrays of a type that allows any length."""
    width = np.int64 if pa.types.is_large_list(kind) else np.int32
    offsets = pa.py_buffer(np.arange(len(rows) + 1, dtype=width) * width(size))
    return pa.Array.from_buffers(kind, len(rows), [None, offsets], children=[rows.flatten()])


def prefetched(parts: Iterator[S], ahead: int) -> Generator[S, None, None]:
    """Yield parts that a thread makes while the length of those that are ready is below `ahead`.

    With 0, each is made when it is wanted, in the consumer's thread.
    """
    if ahead == 0:
        yield from parts
        return
    channel: _Channel[S] = _Channel(ahead)
    thread = threading.Thread(
        target=channel.fill, args=(parts,), name="distributor-batches", daemon=True
    )
    del parts  # it is the thread's
    thread.start()
    try:
        yield from channel.received()
    finally:
        channel.close()


class _Channel(Generic[S]):
    """Passes batches from a thread to another one."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._changed = threading.Condition()
        self._ready: deque[S] = deque()
        self._end: BaseException | None = None
        self._closed = False
        self._process = os.getpid()

    def fill(self, parts: Iterator[S]) -> None:
        end: BaseException = StopIteration()
        try:
            while self._waits_for_room():
                item = next(parts)
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                del item  # it is the consumer's
        except BaseException as error:
            end = error
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def received(self) -> Iterator[S]:
        while True:
            if os.getpid() != self._process:
                raise RuntimeError(
                    "These batches are prepared by a thread of another process, from which this "
                    "one was forked. Begin a new pass here, or set prefetch_batches=0."
                )
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._end)
                if not self._ready:
                    break
                item = self._ready.popleft()
                self._changed.notify_all()
            yield item
            del item  # its memory may be needed for the next one
        if self._end is not None and not isinstance(self._end, StopIteration):
            raise self._end

    def close(self) -> None:
        """End the thread as soon as it has made its current item."""
        if os.getpid() != self._process:
            return  # the lock may have been held when this process was forked
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _waits_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or sum(map(len, self._ready)) < self._ahead)
            return not self._closed
