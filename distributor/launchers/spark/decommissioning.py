"""Notices executors that Spark is about to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from distributor.control.run import NodesLeaving
from distributor.core.text import listed

POLL_SECONDS = 1.0
"""Seconds between two looks at which executors are about to end."""

LeavingExecutors = Callable[[Collection[str] | None], dict[str, str]]
"""Returns the executors that are about to end, on these hosts or (None) on any, by their ids: the
host of each."""


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
        self._known = set(leaving_executors(None)) if attempt else set()
        self._poll_at = 0.0

    def poll(self, hosts: Collection[str]) -> NodesLeaving | None:
        """Return the hosts, among these, of executors that are new; ask at most once a second."""
        now = time.monotonic()
        if now <= self._poll_at:
            return None
        self._poll_at = now + POLL_SECONDS
        leaving = self._leaving_executors(hosts)
        new = {each: host for each, host in leaving.items() if each not in self._known}
        self._known |= new.keys()
        if not new:
            return None
        executors = listed("executor", sorted(new))
        text = f"Spark is about to end {executors}: the ranks are notified."
        return NodesLeaving(frozenset(new.values()), text)
