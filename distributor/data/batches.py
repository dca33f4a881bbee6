"""Reads windows of a dataset, makes batches of them, and prepares batches ahead in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from distributor.data.epochs import Span
from distributor.data.source import Source
from distributor.errors import DistributorError

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
MAX_PIECES = 64
"""Pieces of a table that are not copied into one, although each takes time when it is sliced."""


@dataclass(frozen=True)
class Format:
    """How tables become batches.

    Parameters
    ----------
    convert : callable
        Converts a table, which may contain many batches.
    cut : callable
        Returns the batch from one row to another of a converted table.
    max_rows : int, optional
        The most rows to convert at once.
    """

    convert: Callable[[pa.Table], Any]
    cut: Callable[[Any, int, int], Any]
    max_rows: int | None = None


class Batches(Generic[T]):
    """Batches that can be iterated over again: each pass is the next epoch.

    Parameters
    ----------
    begin : callable
        Returns the iterator of a new pass.
    """

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[T]:
        return self._begin()


def read_chunk(source: Source, chunk: int) -> pa.Table:
    """Read a chunk of a dataset.

    Raises
    ------
    DistributorError
        If it is not on this node.
    """
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
    return table.combine_chunks().take(pa.array(order))


def pieces_of(span: Span) -> NDArray[np.int64]:
    """Return the pieces of a span whose rows are in order: those of its window, cut to its rows."""
    chunks, starts, stops = span.pieces.T
    lengths = stops - starts
    begins = np.cumsum(lengths) - lengths
    first = np.clip(span.begin - begins, 0, lengths)
    last = np.clip(span.end - begins, 0, lengths)
    within = np.stack([chunks, starts + first, starts + last], axis=1)
    pieces: NDArray[np.int64] = within[first < last]
    return pieces


def read_batches(
    source: Source,
    spans: Sequence[Span],
    form: Format,
    batch_size: int | None,
    drop_last: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Yield the batches of spans, and the number of rows of each.

    Parameters
    ----------
    source : Source
        The dataset.
    spans : list of Span
        The rows, in order.
    form : Format
        What the batches are.
    batch_size : int or None
        The rows of a batch; None makes each window a batch.
    drop_last : bool, default False
        Whether the last batch is dropped if it is smaller.
    """
    windows = (read_window(source, span) for span in spans)
    for table in windows if batch_size is None else _regrouped(windows, batch_size):
        size = batch_size or table.num_rows
        at_once = table.num_rows if form.max_rows is None else -(-form.max_rows // size) * size
        for part in _slices(table, at_once):
            converted = form.convert(part)
            for start in range(0, part.num_rows, size):
                stop = min(start + size, part.num_rows)
                if not drop_last or stop - start == size:
                    yield stop - start, form.cut(converted, start, stop)


def _slices(table: pa.Table, rows: int) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)


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


def prefetched(items: Iterator[T], ahead: int) -> Generator[T, None, None]:
    """Yield items that a thread makes, up to so many before they are wanted.

    Parameters
    ----------
    items : iterator
        The items. The thread owns it.
    ahead : int
        The number of items that are ready before they are wanted; 0 makes them in this thread.
    """
    if ahead == 0:
        yield from items
        return
    channel: _Channel[T] = _Channel(ahead)
    thread = threading.Thread(
        target=channel.fill, args=(items,), name="distributor-batches", daemon=True
    )
    del items
    thread.start()
    try:
        yield from channel.received()
    finally:
        channel.close()


class _Channel(Generic[T]):
    """Passes items from a thread to another one."""

    def __init__(self, ahead: int) -> None:
        self._room = threading.Semaphore(ahead)
        self._ready: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._closed = False
        self._process = os.getpid()

    def fill(self, items: Iterator[T]) -> None:
        """Make items while there is room for them, until the channel is closed."""
        try:
            while self._room.acquire() and not self._closed:
                try:
                    self._ready.put(("item", next(items)))
                except StopIteration:
                    return self._ready.put(("end", None))
        except BaseException as error:
            self._ready.put(("error", error))

    def received(self) -> Iterator[T]:
        """Yield the items; an error in the thread is raised here."""
        while True:
            if os.getpid() != self._process:
                raise RuntimeError(
                    "These batches are prepared by a thread of another process, from which this "
                    "one was forked. Begin a new pass here, or set prefetch_batches=0."
                )
            kind, item = self._ready.get()
            if kind == "error":
                raise item
            if kind == "end":
                return
            self._room.release()
            yield item

    def close(self) -> None:
        """End the thread as soon as it has made its current item."""
        self._closed = True
        self._room.release()
