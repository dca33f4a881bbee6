"""How far a run is: the ranks that are up, what rank 0 says, and the line that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable

from distributor.core.telemetry import Progress
from distributor.core.text import counted


class RunProgress:
    """How far a run is.

    Parameters
    ----------
    clock : callable
        Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._up = 0
        self._first: Progress | None = None
        self._latest: Progress | None = None

    @property
    def told(self) -> bool:
        """Whether rank 0 has said how far it is."""
        return self._latest is not None

    def come_up(self, ranks: int) -> None:
        """Note that so many more ranks have begun their work."""
        self._up += ranks

    def note(self, latest: Progress) -> None:
        """Note how far rank 0 is."""
        self._first = self._first or latest
        self._latest = latest

    def line(self, name: str, ranks: int) -> str:
        """Say it in one line, as tqdm does.

        Parameters
        ----------
        name, ranks : str, int
            What runs, and on how many.
        """
        from tqdm import tqdm  # not before a run has gone on for a while

        elapsed = self._clock() - self._began
        up = [] if self._up == ranks else [f"{self._up} up"]
        if self._latest is None or self._first is None:
            return ", ".join(
                [f"{name} on {counted(ranks, 'rank')}", *up, tqdm.format_interval(elapsed)]
            )
        metrics = [f"{key}={value:.4g}" for key, value in self._latest.metrics.items()]
        line = tqdm.format_meter(
            self._latest.done,
            self._latest.total,
            elapsed,
            prefix=name,
            rate=_rate(self._first, self._latest),
            postfix=", ".join([counted(ranks, "rank"), *up, *metrics]),
        )
        return str(line)


def _rate(first: Progress, latest: Progress) -> float | None:
    """Tell how much is done in a second; a run that goes on in another does not start at 0."""
    seconds = latest.at - first.at
    return (latest.done - first.done) / seconds if seconds > 0 else None
