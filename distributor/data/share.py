"""A rank's share of a dataset: its rows in each epoch, the passes over them, and its progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from distributor.data.batches import Format, batches_of, converted, prefetched
from distributor.data.epochs import Epoch, Layout, Order, Span, between
from distributor.data.source import Source
from distributor.rank.context import worker_context


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
    size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
    ahead = whole_number("prefetch_batches", prefetch_batches, 0)
    check_bool("drop_last", drop_last)
    check_bool("shuffle", shuffle)
    seed = whole_number("seed", seed)
    if local_shuffle_seed is not None:
        seed = whole_number("local_shuffle_seed", local_shuffle_seed)
    buffer_rows = None
    if local_shuffle_buffer_size is not None:
        buffer_rows = whole_number("local_shuffle_buffer_size", local_shuffle_buffer_size, 1)
        if size is None or buffer_rows < size:
            raise ValueError(
                f"local_shuffle_buffer_size is {buffer_rows}, so batch_size must be between 1 and "
                f"{buffer_rows}, but is {size}."
            )
    return PassOptions(size, drop_last, ahead, Order(shuffle, buffer_rows, seed))


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, but is {value!r}.")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}.")
    return int(value)


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, but is {value!r}.")


@dataclass
class Pass:
    """One pass over what is left of an epoch."""

    epoch: Epoch  # with what was read of it before
    rows: int = 0  # that each rank has yielded since, or all that it had


class Progress:
    """Counts a shard's epochs and the rows read, and resumes from a checkpoint's position."""

    # Ranks read in lockstep: what rank 0 has read, each rank has read of its own rows.

    def __init__(self, name: str, num_rows: int, rank: int, num_ranks: int) -> None:
        self._name, self._num_rows = name, num_rows
        self._rank, self._num_ranks = rank, num_ranks
        self._pass = Pass(Epoch(0, Order()))
        self._next_epoch = 0
        self._resumed: Epoch | None = None
        self._is_registered = False
        self._has_chosen_epoch = False

    def position(self) -> dict[str, Any]:
        """Return the epoch of the latest pass, and what has been read of it, for JSON."""
        self._register()
        epoch = self._pass.epoch
        if self._pass.rows:
            epoch = epoch.after(self._num_ranks, self._pass.rows)
        return {"name": self._name, "rows": self._num_rows, **epoch.to_position()}

    @property
    def next_epoch(self) -> int:
        self._register()
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; by default it is the one after that of the last pass."""
        self._next_epoch = epoch
        self._has_chosen_epoch = True

    def begin(self, order: Order) -> Pass:
        """Begin a pass; the rest of an epoch that is resumed keeps its order."""
        self._register()
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed.number != self._next_epoch:
            resumed = Epoch(self._next_epoch, order)
        self._next_epoch += 1
        self._pass = Pass(resumed)
        return self._pass

    def _register(self) -> None:
        """Take part in the run's checkpoints. They begin only after arguments are unpickled."""
        register = worker_context().register_loader
        if self._is_registered or register is None:
            return
        self._is_registered = True
        if (position := register(self.position, self._name)) is not None:
            self._resume_from(position)

    def end(self, finished: Pass) -> None:
        """Go on to the next epoch, rows that the pass has dropped included."""
        if self._pass is finished:
            self._pass = Pass(Epoch(finished.epoch.number + 1, finished.epoch.order))

    def _resume_from(self, position: Mapping[str, Any]) -> None:
        epoch = Epoch.from_position(position)
        if position.get("rows") == self._num_rows:
            self._resumed = epoch
        else:
            epoch = Epoch(epoch.number, epoch.order)
            if self._rank == 0:
                print(
                    f"distributor: the checkpoint was stored with {position.get('rows')} rows of "
                    f"{self._name}, which has {self._num_rows} now: epoch {epoch.number} begins "
                    "again.",
                    flush=True,
                )
        if not self._has_chosen_epoch:
            self._next_epoch = epoch.number
        self._pass = Pass(epoch)


@dataclass(frozen=True)
class Share:
    """The rows that are a rank's."""

    source: Source
    layout: Layout
    rank: int
    num_ranks: int
    progress: Progress

    def __len__(self) -> int:
        return self.layout.rows_per_rank(self.num_ranks)[self.rank]

    def spans(self, epoch: Epoch) -> list[Span]:
        return self.layout.plan(epoch, self.rank, self.num_ranks)

    def read_part(
        self,
        part: int,
        parts: int,
        epoch: Epoch,
        form: Format,
        batch_size: int | None,
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """Yield the batches of a part of an epoch, which begins where a batch does.

        They do not count in the position.
        """
        size = batch_size or 1
        batches = -(-len(self) // size)
        start, stop = (size * (each * batches // parts) for each in (part, part + 1))
        spans = between(self.spans(epoch), start, stop)
        ready = converted(self.source, spans, form, batch_size, drop_last)
        return (batch for _, batch in batches_of(ready, form))

    def read(self, options: PassOptions, form: Format, counts: bool = True) -> Iterator[Any]:
        """Yield the batches of the next pass.

        `counts`: whether the position has what was yielded of an epoch, or whole epochs only.
        """
        now = self.progress.begin(options.order)
        if options.batch_size is None and self.layout.split and self.num_ranks > 1:
            counts = False  # other ranks' windows have other numbers of rows
        spans = self.spans(now.epoch)
        parts = converted(self.source, spans, form, options.batch_size, options.drop_last)
        with closing(prefetched(parts, options.prefetch_batches)) as ready:
            for rows, batch in batches_of(ready, form):
                if counts:  # the last batch of another rank may be larger by a row
                    now.rows += options.batch_size or rows
                yield batch
        self.progress.end(now)
