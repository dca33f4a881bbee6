"""Which rows each rank reads in an epoch, in which order, and its position there.

The rows are a function of a dataset's chunks, the number of ranks, and what they have read
already, so that all ranks and the driver compute the same without communicating. Rows are numbered
through the chunks of the dataset.

A *piece* is a range of rows of one chunk: (chunk, start, stop). A *window* is a list of pieces that
is read at once, and may be shuffled. A *span* is a part of a window, in the window's order. What
ranks have left of an epoch is a list of spans, which other ranks can share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from distributor.rank.context import worker_context

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Drop the rows that are left over, repeat some rows, or (False) leave a difference of one row.
Equal: TypeAlias = Literal["drop", "pad", False]
# Bytes of a window, if its order does not set the number of its rows.
WINDOW_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Order:
    """The order of a rank's rows in an epoch."""

    shuffle: bool = False  # the pieces of the rank's share, and the rows within windows
    buffer_rows: int | None = None  # of a window within which rows are shuffled in any case
    seed: int = 0  # determines the order, together with the epoch and the rank
    whole: bool = False  # the share is one window, so that any of its rows may follow another


@dataclass(frozen=True)
class Epoch:
    """An epoch, and what ranks have already read of it."""

    number: int
    order: Order
    # For each earlier attempt at it: the number of ranks, and the rows that each has read.
    history: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_position(cls, position: Mapping[str, Any]) -> Epoch:
        history = tuple((int(ranks), int(rows)) for ranks, rows in position["history"])
        return cls(position["epoch"], Order(**position["order"]), history)

    def to_position(self) -> dict[str, Any]:
        return {
            "epoch": self.number,
            "order": asdict(self.order),
            "history": [list(attempt) for attempt in self.history],
        }

    def after(self, num_ranks: int, rows: int) -> Epoch:
        return replace(self, history=(*self.history, (num_ranks, rows)))


@dataclass(frozen=True, eq=False)
class Span:
    """Some of a window's rows."""

    pieces: NDArray[np.int64]  # of the window; shape (n, 3): chunk, start and stop
    seed: tuple[int, ...] | None  # of the order of the window's rows; None leaves them in order
    begin: int  # in that order
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def own_pieces(self) -> NDArray[np.int64]:
        """Return the pieces of the window, whose rows are in order, cut to the span's rows."""
        return _cut(self.pieces, self.begin, self.end)

    def permutation(self) -> NDArray[np.int64] | None:
        """Return the positions in the window of the span's rows; None if they are in order."""
        if self.seed is None:
            return None
        rng = np.random.default_rng(self.seed)
        order: NDArray[np.int64] = rng.permutation(_num_rows(self.pieces))
        return order[self.begin : self.end]


@dataclass(frozen=True, eq=False)
class Layout:
    """The chunks of a dataset, and how the ranks share them."""

    chunk_rows: NDArray[np.int64]
    chunk_bytes: NDArray[np.int64]
    equal: Equal
    split: bool = True  # if not, each rank reads all of it

    @property
    def num_rows(self) -> int:
        return int(self.chunk_rows.sum())

    @property
    def pieces(self) -> NDArray[np.int64]:
        """All rows of the dataset."""
        starts = np.zeros_like(self.chunk_rows)
        return np.stack([np.arange(len(starts)), starts, self.chunk_rows], axis=1)

    def rows_per_rank(self, num_ranks: int) -> list[int]:
        if not self.split:
            return [self.num_rows] * num_ranks
        *cuts, _ = _cuts(self.num_rows, num_ranks, self.equal)
        sizes = [stop - start for start, stop in pairwise(cuts)]
        return [max(sizes)] * num_ranks if self.equal == "pad" else sizes

    def plan(self, epoch: Epoch, rank: int, num_ranks: int) -> list[Span]:
        if not self.split:
            alone = tuple((1, rows) for _, rows in epoch.history)
            rank, num_ranks, epoch = 0, 1, replace(epoch, history=alone)
        left: list[Span] | None = None
        for earlier_ranks, rows in epoch.history:
            *parts, rest = self._parts(epoch, left, earlier_ranks)
            left = [span for part in parts for span in between(part, rows, _total(part))] + rest
        *parts, _ = self._parts(epoch, left, num_ranks)
        missing = max(map(_total, parts)) - _total(parts[rank]) if self.equal == "pad" else 0
        if not missing:
            return parts[rank]
        source = next(part for part in (parts[rank], *parts) if part)
        return [*parts[rank], replace(source[0], end=source[0].begin + missing)]

    def row_numbers(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Return the numbers of the rows of spans, in their order."""
        begins = np.cumsum(self.chunk_rows) - self.chunk_rows
        found = [np.empty(0, np.int64)]
        for span in spans:
            chunks, starts, stops = span.pieces.T
            ends = np.cumsum(stops - starts)
            at = span.permutation()
            if at is None:
                at = np.arange(span.begin, span.end)
            piece = np.searchsorted(ends, at, side="right")
            found.append(begins[chunks[piece]] + stops[piece] - (ends[piece] - at))
        return np.concatenate(found)

    def _parts(self, epoch: Epoch, left: list[Span] | None, num_ranks: int) -> list[list[Span]]:
        """Divide what is left of an epoch (None: all of it) into the ranks' parts and the rest."""
        total = self.num_rows if left is None else _total(left)
        cuts = _cuts(total, num_ranks, self.equal)
        if left is not None:
            return [between(left, start, stop) for start, stop in pairwise(cuts)]
        return [
            self._windows(_cut(self.pieces, start, stop), epoch, part)
            for part, (start, stop) in enumerate(pairwise(cuts))
        ]

    def _windows(self, pieces: NDArray[np.int64], epoch: Epoch, part: int) -> list[Span]:
        order = epoch.order
        seed = (order.seed % 2**64, epoch.number, part)
        if order.shuffle:
            pieces = pieces[np.random.default_rng((*seed, 0)).permutation(len(pieces))]
        shuffles_rows = order.shuffle or order.buffer_rows is not None
        return [
            Span(window, (*seed, number) if shuffles_rows else None, 0, _num_rows(window))
            for number, window in enumerate(self._grouped(pieces, order), 1)
        ]

    def _grouped(self, pieces: NDArray[np.int64], order: Order) -> list[NDArray[np.int64]]:
        if not len(pieces):
            return []
        if order.whole:
            return [pieces]
        if order.buffer_rows is not None:
            pieces = _split_every(pieces, order.buffer_rows)
            numbers = (np.cumsum(_lengths(pieces)) - 1) // order.buffer_rows
        else:
            row_bytes = self.chunk_bytes / np.maximum(self.chunk_rows, 1)
            sizes = _lengths(pieces) * row_bytes[pieces[:, 0]]
            numbers = ((np.cumsum(sizes) - sizes) // WINDOW_BYTES).astype(np.int64)
        return np.split(pieces, np.flatnonzero(np.diff(numbers)) + 1)


def _cuts(total: int, num_ranks: int, equal: Equal) -> list[int]:
    """Return the first row of each rank, the row after the last rank's, and the number of rows."""
    if equal == "drop":
        return [rank * (total // num_ranks) for rank in range(num_ranks + 1)] + [total]
    return [rank * total // num_ranks for rank in range(num_ranks + 1)] + [total]


def _cut(pieces: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """Return the pieces of some of the rows, from one number to another."""
    lengths = _lengths(pieces)
    begins = np.cumsum(lengths) - lengths
    first, last = (np.clip(bound - begins, 0, lengths) for bound in (start, stop))
    chunks, starts, _ = pieces.T
    cut = np.stack([chunks, starts + first, starts + last], axis=1)
    found: NDArray[np.int64] = cut[first < last]
    return found


def _lengths(pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pieces[:, 2] - pieces[:, 1]
    return lengths


def _num_rows(pieces: NDArray[np.int64]) -> int:
    return int(_lengths(pieces).sum())


def _total(spans: Sequence[Span]) -> int:
    return sum(map(len, spans))


def _split_every(pieces: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Split pieces so that none contains a boundary between two windows of so many rows."""
    ends = np.cumsum(_lengths(pieces))
    boundaries = np.union1d(ends, np.arange(rows, ends[-1], rows))
    begins = np.concatenate([[0], boundaries[:-1]])
    at = np.searchsorted(ends, begins, side="right")
    offsets = pieces[at, 1] + begins - (ends - _lengths(pieces))[at]
    return np.stack([pieces[at, 0], offsets, offsets + boundaries - begins], axis=1)


def between(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    found = []
    at = 0
    for span in spans:
        begin, end = max(start - at, 0), min(stop - at, len(span))
        if begin < end:
            found.append(replace(span, begin=span.begin + begin, end=span.begin + end))
        at += len(span)
    return found


@dataclass
class Pass:
    """One pass over what is left of an epoch."""

    epoch: Epoch  # with what was read of it before
    rows: int = 0  # that each rank has yielded since, or all that it had


class Progress:
    """Counts the epochs and the rows read of a dataset, and resumes from a checkpoint's position.

    Ranks read in lockstep: what rank 0 has read, each rank has read of its own rows. A dataset
    without a name is known by the order in which such ones are registered.
    """

    def __init__(self, name: str | None, num_rows: int, rank: int, num_ranks: int) -> None:
        self._name, self._num_rows = name, num_rows
        self.rank, self.num_ranks = rank, num_ranks
        self._pass = Pass(Epoch(0, Order()))
        self._next_epoch = 0
        self._resumed: Epoch | None = None
        self._is_registered = False
        self._has_chosen_epoch = False

    def position(self) -> dict[str, Any]:
        """Return the epoch of the latest pass, and what has been read of it, for JSON."""
        self._take_part()
        epoch = self._pass.epoch
        if self._pass.rows:
            epoch = epoch.after(self.num_ranks, self._pass.rows)
        named = {} if self._name is None else {"name": self._name}
        return {**named, "rows": self._num_rows, **epoch.to_position()}

    @property
    def next_epoch(self) -> int:
        self._take_part()
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        self._next_epoch = epoch
        self._has_chosen_epoch = True

    def begin(self, order: Order) -> Pass:
        """Begin a pass; the rest of an epoch that is resumed keeps its order."""
        self._take_part()
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed.number != self._next_epoch:
            resumed = Epoch(self._next_epoch, order)
        self._next_epoch += 1
        self._pass = Pass(resumed)
        return self._pass

    def begin_rest(self, left: Epoch) -> Pass:
        """Begin a pass over what is left of an epoch that other ranks have begun."""
        self._next_epoch = left.number + 1
        self._pass = Pass(left)
        return self._pass

    def end(self, finished: Pass) -> None:
        """Go on to the next epoch, rows that the pass has dropped included."""
        if self._pass is finished:
            self._pass = Pass(Epoch(self._next_epoch, finished.epoch.order))

    def register(self, register: Callable[[Callable[[], Any], str | None], Any]) -> None:
        """Take part in the run's checkpoints, and resume if one has the position."""
        self._is_registered = True
        if (position := register(self.position, self._name)) is not None:
            self._resume_from(position)

    def _take_part(self) -> None:
        # Only now: checkpoints begin after arguments, such as shards, are unpickled.
        register = worker_context().register_loader
        if not self._is_registered and register is not None:
            self.register(register)

    def _resume_from(self, position: Mapping[str, Any]) -> None:
        stored = position.get("rows")
        if stored == self._num_rows:
            epoch = self._resumed = Epoch.from_position(position)
        elif self._name is None:
            return  # it may be another dataset's
        else:
            epoch = replace(Epoch.from_position(position), history=())
            if self.rank == 0:
                print(
                    f"distributor: the checkpoint was stored with {stored} rows of {self._name}, "
                    f"which has {self._num_rows} now: epoch {epoch.number} begins again.",
                    flush=True,
                )
        if not self._has_chosen_epoch:
            self._next_epoch = epoch.number
        self._pass = Pass(epoch)
