"""Whether Spark has started a job's tasks, before any of them has connected to the driver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from distributor.launch.spark.polling import Reminder

LOOK_SECONDS = 1.0
"""Seconds between two looks."""


class TaskStarts:
    """Whether Spark has started a barrier job's tasks, which it starts together.

    Parameters
    ----------
    wanted : int
        How many tasks the job has.
    begun : callable
        Returns whether Spark has started any of them, or None if this Spark does not tell. (How
        many it has started is not asked: its count may be ten seconds old.)
    obstacle : callable
        Says, in sentences for the user, what may keep Spark from starting them.
    reminder : Reminder, optional
        Of the wait that this is a part of; by default a new one.
    """

    def __init__(
        self,
        wanted: int,
        begun: Callable[[], bool | None] = lambda: None,
        obstacle: Callable[[], str] = lambda: "",
        reminder: Reminder | None = None,
    ) -> None:
        self._reminder = reminder or Reminder()
        self._wanted = wanted
        self._begun = begun
        self._obstacle = obstacle
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._asked = False
        self._started: bool | None = None
        self._all_since = math.inf

    def look(self) -> None:
        """Ask Spark, at most once a second and until all tasks have started."""
        now = time.monotonic()
        if now < self._look_at or self.all_started:
            return
        self._look_at = now + LOOK_SECONDS
        self._asked, self._started = True, self._begun()
        if self._started:
            self._all_since = now

    @property
    def unknown(self) -> bool:
        """Whether Spark was asked and does not tell."""
        return self._asked and self._started is None

    @property
    def lacking(self) -> bool:
        """Whether Spark has said that it has not started them."""
        return self._started is False

    @property
    def all_started(self) -> bool:
        """Whether Spark has started all tasks."""
        return self._all_since < math.inf

    def all_started_for(self, seconds: float) -> bool:
        """Return whether Spark started all tasks at least so many seconds ago."""
        return time.monotonic() >= self._all_since + seconds

    def message_due(self) -> bool:
        """Return whether the user is to be told now that the tasks have not started."""
        return (self.lacking or self.unknown) and self._reminder.due()

    def shortfall(self) -> str:
        """Say that the tasks have not been started, and what may keep them from it."""
        tasks = f"the {self._wanted} tasks" if self._wanted > 1 else "the one task"
        if self._started is None:
            return f"no word from {tasks} of this run, and this Spark does not tell of them."
        return f"Spark has started none of {tasks} of this run. {self._obstacle()}".rstrip()
