"""Whether Spark has started a job's tasks, before any of them has connected to the driver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from distributor.launch.spark.polling import Reminder

POLL_SECONDS = 1.0
"""Seconds between two questions to Spark."""


class TaskStarts:
    """Whether Spark has started a barrier job's tasks, which it starts together.

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
    """

    def __init__(
        self,
        count: int,
        has_begun: Callable[[], bool | None] = lambda: None,
        obstacle: Callable[[], str] = lambda: "",
        reminder: Reminder | None = None,
    ) -> None:
        self._reminder = reminder or Reminder()
        self._count = count
        self._has_begun = has_begun
        self._obstacle = obstacle
        self._poll_at = time.monotonic() + POLL_SECONDS
        self._polled = False
        self._started: bool | None = None
        self._started_at = math.inf

    def poll(self) -> None:
        """Ask Spark, at most once a second and until the tasks have started."""
        now = time.monotonic()
        if now < self._poll_at or self.have_started:
            return
        self._poll_at = now + POLL_SECONDS
        self._polled, self._started = True, self._has_begun()
        if self._started:
            self._started_at = now

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

    def is_message_due(self) -> bool:
        """Return whether to show now that the tasks have not started."""
        return (self.are_pending or self.are_unknown) and self._reminder.due()

    def shortfall(self) -> str:
        """Return a sentence that the tasks have not started, and what may be the reason."""
        tasks = f"the {self._count} tasks" if self._count > 1 else "the one task"
        if self._started is None:
            return (
                f"nothing was received from {tasks} of this run, and this Spark does not report "
                "whether it has started them."
            )
        return f"Spark has started none of {tasks} of this run. {self._obstacle()}".rstrip()
