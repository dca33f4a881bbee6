"""Reads windows of a dataset, and makes batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from distributor.data.epochs import Span
from distributor.data.row_order import reordered
from distributor.data.source import Source
from distributor.errors import DistributorError

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
MAX_PIECES = 64
"""Pieces of a table that are not copied into one, although each takes time when it is sliced."""
PART_BYTES = 8 * 1024 * 1024
"""Bytes that are converted at once: the C library reuses the memory of smaller arrays."""


@dataclass(frozen=True)
class Format:
    """How tables become batches.

    Parameters
    ----------
    convert : callable
        Converts a table.
    cut : callable, optional
        Returns the batch from one row to another of a converted table, without much work. By
        default each batch is converted by itself.
    max_rows : int, optional
        The most rows to convert at once, if they are more than a batch.
    """

    convert: Callable[[pa.Table], Any]
    cut: Callable[[Any, int, int], Any] | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class Converted:
    """Batches that have been converted at once.

    Parameters
    ----------
    value : object
        What a `Format` has made of them.
    rows : int
        The rows of all.
    batch_size : int
        The rows of each; the last may have fewer.
    """

    value: Any
    rows: int
    batch_size: int

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)


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
    return reordered(table, order)


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


def converted(
    source: Source, spans: Sequence[Span], form: Format, batch_size: int | None, drop_last: bool
) -> Iterator[Converted]:
    """Read spans, and convert their rows.

    Parameters
    ----------
    source : Source
        The dataset.
    spans : list of Span
        The rows, in order.
    form : Format
        What batches are.
    batch_size : int or None
        The rows of a batch; None makes each window a batch.
    drop_last : bool
        Whether the last batch is dropped if it is smaller.
    """
    windows = _windows(source, spans)
    for table in windows if batch_size is None else _regrouped(windows, batch_size):
        size = batch_size or table.num_rows
        if drop_last:
            table = table.slice(0, table.num_rows // size * size)
        at_once = size
        if form.cut is not None:
            at_once = min(form.max_rows or max(table.num_rows, 1), _fitting(table))
        for part in _slices(table, -(-at_once // size) * size):
            yield Converted(form.convert(part), part.num_rows, size)


def batches_of(parts: Iterable[Converted], form: Format) -> Iterator[tuple[int, Any]]:
    """Yield batches, and the number of rows of each."""
    for part in parts:
        for start in range(0, part.rows, part.batch_size):
            stop = min(start + part.batch_size, part.rows)
            yield (
                stop - start,
                part.value if form.cut is None else form.cut(part.value, start, stop),
            )


def _windows(source: Source, spans: Iterable[Span]) -> Iterator[pa.Table]:
    """Read spans; a chunk's memory is freed once what was read with it has been converted."""
    for span in spans:
        yield read_window(source, span)
        for chunk in span.pieces[:, 0].tolist():
            source.release(chunk)


def _fitting(table: pa.Table) -> int:
    """Return about how many rows of a table have `PART_BYTES`, at least one."""
    return max(1, int(table.num_rows * PART_BYTES / max(1, table.nbytes)))


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
