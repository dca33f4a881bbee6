"""The progress of a run: the ranks that have started, rank 0's reports, and the line for both."""

from __future__ import annotations

import time
from collections.abc import Callable

from distributor.core.text import counted
from distributor.rank.messages import Progress


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
        self.is_saved = False
        """Whether the ranks have reported a checkpoint, from which another attempt continues."""

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
        """Return the progress as one line, in the format of tqdm.

        Parameters
        ----------
        name : str
            The run's label.
        ranks : int
            The number of ranks of the run.
        """
        from tqdm import tqdm  # imported only once a run has lasted for some time

        elapsed = self._clock() - self._began
        started = [] if self._started == ranks else [f"{self._started} up"]
        if self._latest is None or self._first is None:
            return ", ".join(
                [f"{name} on {counted(ranks, 'rank')}", *started, tqdm.format_interval(elapsed)]
            )
        metrics = [f"{key}={value:.4g}" for key, value in self._latest.metrics.items()]
        line = tqdm.format_meter(
            self._latest.done,
            self._latest.total,
            elapsed,
            prefix=name,
            rate=_rate(self._first, self._latest),
            postfix=", ".join([counted(ranks, "rank"), *started, *metrics]),
        )
        return str(line)


def _rate(first: Progress, latest: Progress) -> float | None:
    """Return the progress per second. A resumed run does not start at 0."""
    seconds = latest.at - first.at
    return (latest.done - first.done) / seconds if seconds > 0 else None
