"""What Spark says of a job's tasks before any of them has reported to the driver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from distributor.launch.waiting import Reminder

LOOK_SECONDS = 1.0
"""Seconds between two looks."""


class TaskStarts:
    """How many of a job's tasks Spark has started.

    Parameters
    ----------
    wanted : int
        How many tasks the job has.
    count : callable
        Counts those that Spark has started; returns None if this Spark does not tell.
    obstacle : callable
        Says, in sentences for the user, what may keep Spark from starting them.
    reminder : Reminder, optional
        Of the wait that this is a part of; by default a new one.
    """

    def __init__(
        self,
        wanted: int,
        count: Callable[[], int | None] = lambda: None,
        obstacle: Callable[[], str] = lambda: "",
        reminder: Reminder | None = None,
    ) -> None:
        self._reminder = reminder or Reminder()
        self._wanted = wanted
        self._count = count
        self._obstacle = obstacle
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._asked = False
        self._started: int | None = None
        self._all_since = math.inf

    def look(self) -> None:
        """Ask Spark, at most once a second and until all tasks have started."""
        now = time.monotonic()
        if now < self._look_at or self.all_started:
            return
        self._look_at = now + LOOK_SECONDS
        self._asked, self._started = True, self._count()
        if self._started is not None and self._started >= self._wanted:
            self._all_since = now

    @property
    def unknown(self) -> bool:
        """Whether Spark was asked and does not tell."""
        return self._asked and self._started is None

    @property
    def lacking(self) -> bool:
        """Whether Spark has said that it has started too few."""
        return self._started is not None and not self.all_started

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
        """Say how many tasks have been started, and what may keep the others from it."""
        tasks = f"the {self._wanted} tasks" if self._wanted > 1 else "the one task"
        if self._started is None:
            return f"no word from {tasks} of this run, and this Spark does not tell of them."
        started = f"{self._started or 'none'} of {tasks}"
        return f"Spark has started {started} of this run. {self._obstacle()}".rstrip()
