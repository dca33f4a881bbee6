"""What Spark reports of a job's tasks before all of them have connected to the driver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from distributor.control.polling import Reminder
from distributor.control.run import NodeStarts

POLL_SECONDS = 1.0
"""Seconds between two questions to Spark."""
SILENT_SECONDS = 15.0
"""Seconds from the start of all tasks until a message says that nothing was received from them."""


class TaskStarts(NodeStarts):
    """Whether Spark has started a barrier job's tasks, which it starts together, and what they do.

    A node that has failed to connect to the driver waits for the others in a barrier of Spark. A
    node whose Python has not started yet does not.

    Parameters
    ----------
    count : int
        How many tasks the job has.
    has_begun : callable
        Returns whether Spark has started any of them, or None if this Spark does not report it.
        (How many have started is not asked, because Spark's count may be ten seconds old.)
    obstacle : callable
        Returns what may keep Spark from starting them, in sentences for the user.
    reminder : Reminder, optional
        The reminder of the wait that this is a part of; by default a new one.
    barrier_arrivals : callable
        Returns how many tasks wait in a barrier, and how many barriers all of them have passed, or
        None if this Spark does not report it.
    """

    def __init__(
        self,
        count: int,
        has_begun: Callable[[], bool | None] = lambda: None,
        obstacle: Callable[[], str] = lambda: "",
        reminder: Reminder | None = None,
        barrier_arrivals: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self._reminder = reminder or Reminder()
        self._count = count
        self._has_begun = has_begun
        self._obstacle = obstacle
        self._barrier_arrivals = barrier_arrivals
        self._arrivals: tuple[int, int] | None = None
        self._poll_at = time.monotonic() + POLL_SECONDS
        self._polled = False
        self._started: bool | None = None
        self._started_at = math.inf

    def poll(self) -> None:
        """Ask Spark, at most once a second."""
        now = time.monotonic()
        if now < self._poll_at:
            return
        self._poll_at = now + POLL_SECONDS
        if not self.have_started:
            self._polled, self._started = True, self._has_begun()
            if self._started:
                self._started_at = now
        self._arrivals = self._barrier_arrivals()

    @property
    def are_unknown(self) -> bool:
        """Whether Spark was asked and does not report it."""
        return self._polled and self._started is None

    @property
    def are_pending(self) -> bool:
        """Whether Spark reported that it has not started them."""
        return self._started is False

    @property
    def have_started(self) -> bool:
        """Whether Spark has started all tasks."""
        return self._started_at < math.inf

    def all_started_for(self, seconds: float) -> bool:
        """Return whether Spark started all tasks at least so many seconds ago."""
        return time.monotonic() >= self._started_at + seconds

    @property
    def reports_unlinked(self) -> bool:
        """Whether Spark reports which tasks have come to a barrier."""
        return self._arrivals is not None

    @property
    def num_unlinked(self) -> int:
        """How many tasks wait in a barrier."""
        return self._arrivals[0] if self._arrivals else 0

    @property
    def all_unlinked(self) -> bool:
        """Whether all tasks have come to a barrier."""
        return self._arrivals is not None and self._arrivals[1] > 0

    def show_shortfall(self) -> None:
        """Show, at the intervals of the reminder, that nothing was received from the tasks."""
        if self.are_pending or self.are_unknown or self.all_started_for(SILENT_SECONDS):
            self._reminder.show(self.shortfall)

    def shortfall(self) -> str:
        """Return a sentence that nothing was received from the tasks, and why that may be."""
        tasks = f"the {self._count} tasks" if self._count > 1 else "the one task"
        if self._started is None:
            return (
                f"nothing was received from {tasks} of this run, and this Spark does not report "
                "whether it has started them."
            )
        if self._started:
            return (
                f"nothing was received from {tasks} of this run, which Spark has started: Python "
                "is still starting there, or has no link to this process and prepares the "
                "environment or the data."
            )
        return f"Spark has started none of {tasks} of this run. {self._obstacle()}".rstrip()
