"""The deadlines of an attempt."""

from __future__ import annotations

import math
from typing import Literal

UNLINKED_SECONDS = 60.0
"""Seconds that nodes without a link have to start their ranks, and to enforce ``timeout``.

They enforce it to the second. The driver does not know when their ranks start, so it ends only
the tasks that do not end by themselves.
"""
STOP_SECONDS = 15.0
"""Seconds for nodes to stop their ranks and end, after which they are cancelled."""


class Deadlines:
    """When the ranks of an attempt must have started, and when they must have ended.

    Parameters
    ----------
    start : float
        When ``start_timeout`` ends.
    timeout : float or None
        Seconds that the ranks may take once they have started.
    """

    def __init__(self, start: float, timeout: float | None) -> None:
        self.start = start
        self._timeout = timeout
        self._end = math.inf
        self._stopped_by = math.inf
        self._running = False

    def start_run(self, now: float) -> None:
        """Start the clock of ``timeout``, the first time."""
        if not self._running and self._timeout is not None:
            self._end = now + self._timeout
        self._running = True

    def start_unlinked_run(self, now: float, *, prepares: bool) -> None:
        """Start the same clock for nodes that cannot report when their ranks start."""
        if self._timeout is not None:
            started = max(now, self.start) if prepares else now
            self._end = started + self._timeout + UNLINKED_SECONDS

    def start_stop(self, now: float) -> None:
        """Start the clock of nodes that end by themselves once their ranks are stopped."""
        self._stopped_by = now + STOP_SECONDS

    def is_stop_overdue(self, now: float) -> bool:
        """Return, once, whether these nodes have not ended in time."""
        if now <= self._stopped_by:
            return False
        self._stopped_by = math.inf
        return True

    def passed(self, now: float, *, all_started: bool) -> Literal["start", "end"] | None:
        if now > self.start and not all_started:
            return "start"
        return "end" if now > self._end else None
