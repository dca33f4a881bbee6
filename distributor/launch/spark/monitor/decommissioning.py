"""Notices executors that Spark is about to end."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECONDS = 1.0
"""Seconds between two looks at which executors are about to end."""

LeavingExecutors = Callable[[set[str] | None], set[str]]
"""Returns the ids of executors that are about to end, on these hosts or (None) on any."""


class DecommissioningWatch:
    """Finds executors that Spark began to decommission during an attempt.

    Parameters
    ----------
    leaving_executors : callable
        Asks Spark for the executors that it is about to end.
    attempt : int
        The number of the attempt. Executors that were about to end before a further attempt began
        have no task of it, and are ignored.
    """

    def __init__(self, leaving_executors: LeavingExecutors, attempt: int) -> None:
        self._leaving_executors = leaving_executors
        self._known = leaving_executors(None) if attempt else set()
        self._poll_at = 0.0

    def poll(self, hosts: set[str]) -> set[str]:
        """Return the executors on these hosts that are new; ask Spark at most once a second."""
        now = time.monotonic()
        if now <= self._poll_at:
            return set()
        self._poll_at = now + POLL_SECONDS
        new = self._leaving_executors(hosts) - self._known
        self._known |= new
        return new
