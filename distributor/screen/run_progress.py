"""The progress of an attempt: the states of its ranks, rank 0's reports, and the line for both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from distributor.core.text import counted
from distributor.rank.messages import Progress

BAR_WIDTH = 10


class RunProgress:
    """The progress of an attempt.

    Parameters
    ----------
    num_ranks : int
        The number of its ranks.
    clock : callable
        Returns monotonic seconds.

    Attributes
    ----------
    hosts : dict of int to str
        The host of each rank that has started.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_ranks = num_ranks
        self.hosts: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._clock = clock
        self._began = clock()
        self._first: Progress | None = None
        self._latest: Progress | None = None
        self.checkpoints = 0
        """How many checkpoints the ranks have reported, from which another attempt continues."""

    @property
    def is_reported(self) -> bool:
        """Whether rank 0 has reported its progress."""
        return self._latest is not None

    @property
    def states(self) -> dict[int, str]:
        """The state of each rank: "starting", "running", "finished" or "failed"."""
        states = dict.fromkeys(range(self.num_ranks), "starting")
        return states | dict.fromkeys(self.hosts, "running") | self._ended

    def start(self, ranks: Iterable[int], host: str) -> None:
        """Record that ranks have started. The time starts with the last of them."""
        self.hosts.update(dict.fromkeys(ranks, host))
        if len(self.hosts) == self.num_ranks:
            self._began = self._clock()

    def end(self, ranks: Iterable[int], state: str) -> None:
        """Record that ranks have ended; the first state that is recorded for a rank remains."""
        for rank in ranks:
            self._ended.setdefault(rank, state)

    def update(self, latest: Progress) -> None:
        """Record rank 0's latest report."""
        self._first = self._first or latest
        self._latest = latest

    @property
    def share(self) -> float | None:
        """The part of the work that is done; None if it is not known."""
        latest = self._latest
        if latest is None or not latest.total or latest.done >= latest.total + 0.5:
            return None
        return latest.done / latest.total

    def line(self, name: str) -> str:
        """Return the progress as one line, in the format of tqdm."""
        if self._latest is None:
            elapsed = _interval(self._clock() - self._began)
            return ", ".join([f"{name} on {counted(self.num_ranks, 'rank')}", *self._up(), elapsed])
        if self.share is None:
            return f"{name}: {self.meter()}"
        return f"{name}: {100 * self.share:3.0f}%|{_bar(self.share)}| {self.meter()}"

    def meter(self) -> str:
        """Return rank 0's latest report, the time, the speed and the metrics."""
        assert self._latest is not None
        assert self._first is not None
        elapsed = self._clock() - self._began
        metrics = [f"{key}={value:.4g}" for key, value in self._latest.metrics.items()]
        notes = ", ".join([counted(self.num_ranks, "rank"), *self._up(), *metrics])
        done, total = self._latest.done, self._latest.total
        rate = _rate(self._first, self._latest) or (done / elapsed if elapsed else 0)
        speed = f"{1 / rate:5.2f}s/it" if 0 < rate < 1 else f"{rate:5.2f}it/s" if rate else "?it/s"
        if total is None or self.share is None:
            return f"{done}it [{_interval(elapsed)}, {speed}, {notes}]"
        remaining = _interval((total - done) / rate) if rate else "?"
        return f"{done}/{total} [{_interval(elapsed)}<{remaining}, {speed}, {notes}]"

    def _up(self) -> list[str]:
        return [] if len(self.hosts) == self.num_ranks else [f"{len(self.hosts)} up"]


def _rate(first: Progress, latest: Progress) -> float | None:
    """Return the progress per second. A resumed run does not start at 0."""
    seconds = latest.at - first.at
    return (latest.done - first.done) / seconds if seconds > 0 else None


def _interval(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _bar(share: float) -> str:
    whole, eighths = divmod(int(max(share, 0) * BAR_WIDTH * 8), 8)
    return ("█" * whole + " ▏▎▍▌▋▊▉"[eighths])[:BAR_WIDTH].ljust(BAR_WIDTH)
