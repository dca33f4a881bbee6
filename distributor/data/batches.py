"""A rank's share of a dataset, read as batches, which a thread prepares ahead."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distributor.data.epochs import Epoch, Layout, Order, Progress, Span, between
from distributor.errors import DistributorError
from distributor.rank.context import worker_context

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
S = TypeVar("S", bound=Sized)
# Pieces of a table that are not copied into one, although each takes time when it is sliced.
MAX_PIECES = 64
# Bytes that are converted at once: the C library reuses the memory of smaller arrays.
PART_BYTES = 8 * 1024 * 1024


class Source(Protocol):
    """A dataset as chunks of rows, with what every rank knows of all of them."""

    name: str
    schema: pa.Schema
    vectors: frozenset[str]  # the columns of Spark ML vectors, as structs
    chunk_bytes: NDArray[np.int64]  # in memory, at least roughly
    null_counts: Mapping[str, int] | None  # of columns of the whole dataset, if it is known

    def read(self, chunk: int) -> pa.RecordBatch | pa.Table:
        """Read a chunk; raises LookupError if this rank cannot."""

    def release(self, chunk: int) -> None:
        """Free memory of a chunk that has been read. It can be read again, and views stay valid."""


class CachedSource:
    """A source that keeps the chunks read last, within this process."""

    def __init__(self, source: Source, max_bytes: float) -> None:
        self.name, self.schema, self.vectors = source.name, source.schema, source.vectors
        self.chunk_bytes, self.null_counts = source.chunk_bytes, source.null_counts
        self._source, self._max_bytes = source, max_bytes
        self._chunks: dict[int, pa.RecordBatch | pa.Table] = {}  # the least recently used first
        self._size = 0

    def read(self, chunk: int) -> pa.RecordBatch | pa.Table:
        found = self._chunks.pop(chunk, None)
        if found is None:
            found = self._source.read(chunk)
            self._size += int(self.chunk_bytes[chunk])
        self._chunks[chunk] = found
        while self._size > self._max_bytes and len(self._chunks) > 1:
            oldest = next(iter(self._chunks))
            del self._chunks[oldest]
            self._source.release(oldest)
            self._size -= int(self.chunk_bytes[oldest])
        return found

    def release(self, chunk: int) -> None:
        """Do nothing: chunks are kept while there is room."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_chunks": {}, "_size": 0}


@dataclass(frozen=True)
class Format:
    """How tables become batches."""

    convert: Callable[[pa.Table], Any]
    # Returns the batch from one row to another of a converted table, without much work. By default
    # each batch is converted by itself.
    cut: Callable[[Any, int, int], Any] | None = None
    max_rows: int | None = None  # to convert at once, if they are more than a batch
    change: Callable[[Any], Any] | None = None  # makes another object of each batch


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
        return worker_context().clock.timed(self._begin())


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
    pieces = span.own_pieces() if order is None else span.pieces  # all: rows may be anywhere
    tables = [
        read_chunk(source, chunk).slice(start, stop - start)
        for chunk, start, stop in pieces.tolist()
    ]
    table = pa.concat_tables(tables)
    if order is None:
        return table if len(tables) <= MAX_PIECES else table.combine_chunks()
    indices = pa.array(order)
    columns = [_taken(whole(column), indices) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def converted(
    source: Source, spans: Iterable[Span], form: Format, options: PassOptions
) -> Iterator[Converted]:
    tables, size = _windows(source, spans), options.batch_size
    if size is not None:
        tables = _regrouped(tables, size)
    return converted_tables(tables, form, size, options.drop_last)


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
            yield stop - start, batch if form.change is None else form.change(batch)


def _windows(source: Source, spans: Iterable[Span]) -> Iterator[pa.Table]:
    """Read spans; a chunk's memory is freed once what was read with it has been converted."""
    for span in spans:
        yield read_window(source, span)
        for chunk in span.pieces[:, 0].tolist():
            source.release(chunk)


def _regrouped(windows: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield tables of a multiple of so many rows; only the last may have fewer left."""
    waiting: list[pa.Table] = []
    count = 0
    for window in windows:
        waiting.append(window)
        count += window.num_rows
        if count >= rows:
            joined = pa.concat_tables(waiting)  # without a copy
            whole = count // rows * rows
            yield joined.slice(0, whole)
            count -= whole
            waiting = [joined.slice(whole)] if count else []
    if waiting:
        yield pa.concat_tables(waiting)


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without a copy if it is one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _taken(column: pa.Array, indices: pa.Array) -> pa.Array:
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
        self._finish(end)

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
        if os.getpid() == self._process:  # else the lock may have been held at the fork
            self._finish(StopIteration())

    def _finish(self, end: BaseException) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _waits_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._end or sum(map(len, self._ready)) < self._ahead)
            return self._end is None


@dataclass(frozen=True)
class PassOptions:
    """What a pass reads: the rows of its batches, their order, and how far ahead."""

    batch_size: int | None = None  # None makes each window a batch
    drop_last: bool = False
    prefetch_batches: int = 0
    order: Order = field(default_factory=Order)


def pass_options(
    *,
    batch_size: int | None,
    drop_last: bool = False,
    prefetch_batches: int = 0,
    shuffle: bool = False,
    seed: int = 0,
    local_shuffle_buffer_size: int | None = None,
    local_shuffle_seed: int | None = None,
) -> PassOptions:
    if batch_size is not None:
        batch_size = whole_number("batch_size", batch_size, 1)
    ahead = whole_number("prefetch_batches", prefetch_batches, 0)
    check_bool("drop_last", drop_last)
    check_bool("shuffle", shuffle)
    seed = whole_number("seed", seed)
    if local_shuffle_seed is not None:
        seed = whole_number("local_shuffle_seed", local_shuffle_seed)
    if (buffer_rows := local_shuffle_buffer_size) is not None:
        buffer_rows = whole_number("local_shuffle_buffer_size", buffer_rows, 1)
        if batch_size is None or buffer_rows < batch_size:
            raise ValueError(
                f"local_shuffle_buffer_size is {buffer_rows}, so batch_size must be between 1 and "
                f"{buffer_rows}, but is {batch_size}."
            )
    return PassOptions(batch_size, drop_last, ahead, Order(shuffle, buffer_rows, seed))


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, but is {value!r}.")


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, but is {value!r}.")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}.")
    return int(value)


@dataclass(frozen=True)
class Share:
    """The rows that are a rank's."""

    source: Source
    layout: Layout
    progress: Progress

    def __len__(self) -> int:
        return self.layout.rows_per_rank(self.progress.num_ranks)[self.progress.rank]

    def spans(self, epoch: Epoch) -> list[Span]:
        return self.layout.plan(epoch, self.progress.rank, self.progress.num_ranks)

    def in_memory(self) -> Share:
        """Return the share with its rows in memory, and the same progress."""
        held = CachedSource(self.source, math.inf)
        for span in self.spans(Epoch(0, Order())):
            for chunk in span.own_pieces()[:, 0].tolist():
                read_chunk(held, chunk)
        return replace(self, source=held)

    def read_part(
        self, part: int, parts: int, epoch: Epoch, form: Format, options: PassOptions
    ) -> Iterator[Any]:
        """Yield the batches of a part of an epoch, which begins where a batch does.

        They do not count in the position.
        """
        size = options.batch_size or 1
        batches = -(-len(self) // size)
        start, stop = (size * (each * batches // parts) for each in (part, part + 1))
        spans = between(self.spans(epoch), start, stop)
        ready = converted(self.source, spans, form, options)
        return (batch for _, batch in batches_of(ready, form))

    def read(self, options: PassOptions, form: Format, counts: bool = True) -> Iterator[Any]:
        """Yield the batches of the next pass.

        `counts`: whether the position has what was yielded of an epoch, or whole epochs only.
        """
        now = self.progress.begin(options.order)
        if options.batch_size is None and self.layout.split and self.progress.num_ranks > 1:
            counts = False  # other ranks' windows have other numbers of rows
        parts = converted(self.source, self.spans(now.epoch), form, options)
        with closing(prefetched(parts, options.prefetch_batches)) as ready:
            for rows, batch in batches_of(ready, form):
                if counts:  # the last batch of another rank may be larger by a row
                    now.rows += options.batch_size or rows
                yield batch
        self.progress.end(now)
