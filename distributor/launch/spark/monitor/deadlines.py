"""The deadlines of an attempt, and the stacks that the error shows when one has passed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from distributor.errors import RunTimeout, StartTimeout
from distributor.launch.settings import Settings
from distributor.launch.spark.monitor.nodes import Nodes

STACKS_SECONDS = 3.0
"""Seconds for the nodes to report the stacks of their ranks."""
UNLINKED_STACKS_SECONDS = 15.0
"""The same if some nodes can do so through Spark alone, by failing at the deadline themselves."""
UNLINKED_SECONDS = 60.0
"""Seconds that nodes without a link have to start their ranks, and to enforce ``timeout``.

They enforce it to the second. The driver does not know when their ranks start, so it ends only
the tasks that do not end by themselves.
"""
STOP_SECONDS = 15.0
"""Seconds for nodes to stop their ranks and end their tasks, after which the job is cancelled."""


class Deadlines:
    """When the ranks of an attempt must have started, and when they must have ended.

    Parameters
    ----------
    settings : Settings
        The run's settings, with ``timeout``.
    start : float
        When, by ``time.monotonic``, ``start_timeout`` ends.
    """

    def __init__(self, settings: Settings, start: float) -> None:
        self._settings = settings
        self._start = start
        self._end = math.inf
        self._stopped_by = math.inf
        self._running = False

    def start_run(self) -> None:
        """Start the clock of ``timeout``, the first time."""
        if not self._running and self._settings.timeout is not None:
            self._end = time.monotonic() + self._settings.timeout
        self._running = True

    def start_unlinked_run(self) -> None:
        """Start the same clock for nodes that cannot report when their ranks start."""
        if self._settings.timeout is not None:
            start_by = self._start if self._settings.environment else 0.0
            started = max(time.monotonic(), start_by)
            self._end = started + self._settings.timeout + UNLINKED_SECONDS

    def start_stop(self) -> None:
        """Start the clock of a job whose tasks end by themselves once their ranks are stopped."""
        self._stopped_by = time.monotonic() + STOP_SECONDS

    def is_stop_overdue(self) -> bool:
        """Return, once, whether that job has not ended in time."""
        if time.monotonic() <= self._stopped_by:
            return False
        self._stopped_by = math.inf
        return True

    def passed(
        self, nodes: Nodes, late_nodes: Callable[[], set[int]]
    ) -> StartTimeout | RunTimeout | None:
        """Return the error if a deadline has passed.

        Parameters
        ----------
        nodes : Nodes
            The nodes, which the error names.
        late_nodes : callable
            Returns the nodes whose ranks should have started.
        """
        now = time.monotonic()
        if now > self._start and (late := late_nodes()):
            return StartTimeout(f"After start_timeout, still starting: {nodes.describe(late)}.")
        if now > self._end:
            return RunTimeout(
                f"The run took longer than its timeout of {self._settings.timeout:g} s. "
                f"Still busy: {nodes.describe(nodes.working) or 'no known node'}."
            )
        return None


class StackReports:
    """The Python stacks that nodes have reported since they were asked for them."""

    def __init__(self) -> None:
        self._by_node: dict[int, dict[int, str]] = {}

    def clear(self) -> None:
        """Forget all stacks, because the nodes are asked again."""
        self._by_node = {}

    def add(self, node: int, stacks: dict[int, str]) -> None:
        """Add the stacks of a node's ranks, by rank."""
        self._by_node[node] = stacks

    def missing(self, nodes: set[int]) -> set[int]:
        """Return the nodes of these that have not answered."""
        return nodes - self._by_node.keys()

    def by_rank(self) -> dict[int, str]:
        """Return the stacks of all ranks."""
        return {rank: text for stacks in self._by_node.values() for rank, text in stacks.items()}
