"""Stalls: all ranks of an attempt idle for so long that one of them probably hangs."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import NamedTuple

MIN_INTERVAL, MAX_INTERVAL = 0.5, 10.0
"""Bounds of the seconds between two measurements of a node's activity."""
INTERVALS = 10
"""Measurements within the shorter of the two limits."""


def activity_interval(warning: float | None, timeout: float | None) -> float | None:
    """Return the seconds between two measurements of activity; None if no limit needs them."""
    limits = [limit for limit in (warning, timeout) if limit is not None]
    if not limits:
        return None
    return min(max(min(limits) / INTERVALS, MIN_INTERVAL), MAX_INTERVAL)


class Stall(NamedTuple):
    """A limit that has passed while all ranks were idle."""

    setting: str
    seconds: float

    @property
    def ends_attempt(self) -> bool:
        return self.setting == "stall_timeout"


class StallWatch:
    """Compares for how long the nodes of an attempt have been idle with the user's limits.

    Parameters
    ----------
    warning, timeout : float or None
        ``stall_warning`` and ``stall_timeout``.
    """

    def __init__(self, warning: float | None, timeout: float | None) -> None:
        self._warning = math.inf if warning is None else warning
        self._timeout = math.inf if timeout is None else timeout
        self._idle_since: dict[int, float] = {}
        self._has_warned = False

    def note(self, node: int, idle_seconds: float, now: float) -> None:
        """Note for how long a node has been idle; 0.0 if it is active."""
        if idle_seconds:
            self._idle_since[node] = now - idle_seconds
        else:
            self.forget(node)

    def forget(self, node: int) -> None:
        """Forget a node whose activity is no longer known."""
        self._idle_since.pop(node, None)
        self._has_warned = False

    def check(self, nodes: Set[int], now: float) -> Stall | None:
        """Return the stall if all of these nodes have been idle for longer than a limit.

        Each stall is returned once as a warning, before the ranks are active again.
        """
        if not nodes or not nodes <= self._idle_since.keys():
            return None
        seconds = now - max(self._idle_since[node] for node in nodes)
        if seconds >= self._timeout:
            return Stall("stall_timeout", self._timeout)
        if seconds >= self._warning and not self._has_warned:
            self._has_warned = True
            return Stall("stall_warning", self._warning)
        return None
