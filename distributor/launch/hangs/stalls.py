"""Stalls: all ranks of an attempt idle for so long that one of them probably hangs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass

from distributor.errors import RunStalled
from distributor.launch.output.messages import warn
from distributor.launch.settings import Settings
from distributor.node.worker.stacks import append_stacks

MIN_INTERVAL, MAX_INTERVAL = 0.5, 10.0
"""Bounds of the seconds between two measurements of a node's activity."""
INTERVALS = 10
"""Measurements within the shorter of the two limits."""


def activity_interval(settings: Settings) -> float | None:
    """Return the seconds between two measurements of activity; None if no limit needs them."""
    limits = [
        limit for limit in (settings.stall_warning, settings.stall_timeout) if limit is not None
    ]
    if not limits:
        return None
    return min(max(min(limits) / INTERVALS, MIN_INTERVAL), MAX_INTERVAL)


@dataclass(frozen=True)
class Stall:
    """A limit that has passed while all ranks were idle.

    Parameters
    ----------
    text : str
        What has happened, with the limit.
    ends_attempt : bool
        Whether the attempt fails.
    """

    text: str
    ends_attempt: bool

    def report(self, stacks: Mapping[int, str]) -> None:
        """Show where the ranks are, as a warning or as an error.

        Raises
        ------
        RunStalled
            If the stall ends the attempt.
        """
        text = append_stacks(self.text, stacks)
        if self.ends_attempt:
            raise RunStalled(text, stacks=stacks)
        warn(text)


class StallWatch:
    """Compares for how long the nodes of an attempt have been idle with the user's limits.

    Parameters
    ----------
    settings : Settings
        The run's settings, with ``stall_warning`` and ``stall_timeout``.
    """

    def __init__(self, settings: Settings) -> None:
        self._spelling = settings.spelling
        self._warning = math.inf if settings.stall_warning is None else settings.stall_warning
        self._timeout = math.inf if settings.stall_timeout is None else settings.stall_timeout
        self._idle_since: dict[int, float] = {}
        self._has_warned = False

    def note(self, node: int, idle_seconds: float) -> None:
        """Note for how long a node has been idle; 0.0 if it is active."""
        if idle_seconds:
            self._idle_since[node] = time.monotonic() - idle_seconds
        else:
            self.forget(node)

    def forget(self, node: int) -> None:
        """Forget a node whose activity is no longer known."""
        self._idle_since.pop(node, None)
        self._has_warned = False

    def check(self, nodes: Set[int]) -> Stall | None:
        """Return the stall if all of these nodes have been idle for longer than a limit.

        Each stall is returned once as a warning, before the ranks are active again.
        """
        if not nodes or not nodes <= self._idle_since.keys():
            return None
        seconds = time.monotonic() - max(self._idle_since[node] for node in nodes)
        if seconds >= self._timeout:
            return self._stall("stall_timeout", self._timeout, ends_attempt=True)
        if seconds >= self._warning and not self._has_warned:
            self._has_warned = True
            return self._stall("stall_warning", self._warning, ends_attempt=False)
        return None

    def _stall(self, setting: str, limit: float, *, ends_attempt: bool) -> Stall:
        text = (
            f"No rank has printed, reported, or used its CPU or GPU for {limit:g} s "
            f"({self._spelling.of(setting)})."
        )
        return Stall(text, ends_attempt)
