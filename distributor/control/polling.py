"""Polls for changes that Spark has no event for, such as executors that come or go."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TypeVar

from distributor.control.graceful_shutdown import Cancellation
from distributor.screen.messages import notify

REMINDER_SECONDS = 5.0
"""Seconds until the first message about a wait; each further interval is twice as long."""
MAX_REMINDER_SECONDS = 60.0
"""The longest interval between two messages about one wait."""
POLL_SECONDS = 0.05
"""Seconds between two polls."""

Obstacle = TypeVar("Obstacle")


class Reminder:
    """Shows messages about a wait: after 5 s, then 10, 20, 40 and 60 s later, and none twice.

    Parameters
    ----------
    clock : callable
        Returns seconds on a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval = REMINDER_SECONDS
        self._due_at = clock() + self._interval
        self._shown = ""

    def show(self, describe: Callable[[], str]) -> None:
        """Show a message if one is due, unless it is the same as the last one."""
        if self.due() and (text := describe()) != self._shown:
            self._shown = text
            notify(f"Waiting: {text}")

    def due(self) -> bool:
        """Return whether a message is due now; if so, the next one is due an interval later."""
        now = self._clock()
        if now < self._due_at:
            return False
        self._interval = min(2 * self._interval, MAX_REMINDER_SECONDS)
        self._due_at = now + self._interval
        return True


def poll_until(
    obstacle: Callable[[], Obstacle | None],
    deadline: float,
    cancellation: Cancellation,
    describe: Callable[[Obstacle], str] | None = None,
    reminder: Reminder | None = None,
) -> Obstacle | None:
    """Wait until there is no obstacle."""
    reminder = reminder or Reminder()
    while (left := obstacle()) is not None and time.monotonic() <= deadline:
        if describe is not None:
            reminder.show(functools.partial(describe, left))
        cancellation.check()
        time.sleep(POLL_SECONDS)
    return left
