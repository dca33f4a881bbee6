"""The progress of a run: the ranks that have started, rank 0's reports, and the line for both."""

from __future__ import annotations

import time
from collections.abc import Callable

from distributor.core.text import counted
from distributor.rank.messages import Progress

BAR_WIDTH = 10


class RunProgress:
    """The progress of a run.

    Parameters
    ----------
    clock : callable
        Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._started = 0
        self._first: Progress | None = None
        self._latest: Progress | None = None
        self.checkpoints = 0
        """How many checkpoints the ranks have reported, from which another attempt continues."""

    @property
    def is_reported(self) -> bool:
        """Whether rank 0 has reported its progress."""
        return self._latest is not None

    def add_started(self, ranks: int) -> None:
        """Record that this many more ranks have started."""
        self._started += ranks

    def update(self, latest: Progress) -> None:
        """Record rank 0's latest report."""
        self._first = self._first or latest
        self._latest = latest

    def line(self, name: str, ranks: int) -> str:
        """Return the progress as one line, in the format of tqdm."""
        elapsed = self._clock() - self._began
        started = [] if self._started == ranks else [f"{self._started} up"]
        if self._latest is None or self._first is None:
            return ", ".join([f"{name} on {counted(ranks, 'rank')}", *started, _interval(elapsed)])
        metrics = [f"{key}={value:.4g}" for key, value in self._latest.metrics.items()]
        notes = ", ".join([counted(ranks, "rank"), *started, *metrics])
        done, total = self._latest.done, self._latest.total
        rate = _rate(self._first, self._latest) or (done / elapsed if elapsed else 0)
        speed = f"{1 / rate:5.2f}s/it" if 0 < rate < 1 else f"{rate:5.2f}it/s" if rate else "?it/s"
        if not total or done >= total + 0.5:
            return f"{name}: {done}it [{_interval(elapsed)}, {speed}, {notes}]"
        remaining = _interval((total - done) / rate) if rate else "?"
        return (
            f"{name}: {100 * done / total:3.0f}%|{_bar(done / total)}| {done}/{total} "
            f"[{_interval(elapsed)}<{remaining}, {speed}, {notes}]"
        )


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
