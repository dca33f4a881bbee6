"""Waiting for changes that Spark has no event for, such as executors that come or go."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from distributor.launch.cancellation import Cancellation
from distributor.launch.output.messages import notify

TELL_SECONDS = 5.0
"""Seconds until the first message about a wait; each further interval is twice as long."""
MAX_TELL_SECONDS = 60.0
"""The longest interval between two messages about one wait."""
LOOK_SECONDS = 0.05
"""Seconds between two looks."""

Obstacle = TypeVar("Obstacle")


class Reminder:
    """Says when a message about a wait is due: after 5 s, 10 s later, then 20, 40 and 60 s.

    Parameters
    ----------
    clock : callable
        Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval = TELL_SECONDS
        self._due_at = clock() + self._interval

    def due(self) -> bool:
        """Return whether a message is due now; if so, the next one is due an interval later."""
        now = self._clock()
        if now < self._due_at:
            return False
        self._interval = min(2 * self._interval, MAX_TELL_SECONDS)
        self._due_at = now + self._interval
        return True


def poll_until(
    obstacle: Callable[[], Obstacle | None],
    deadline: float,
    cancellation: Cancellation,
    words: Callable[[Obstacle], str] | None = None,
    reminder: Reminder | None = None,
) -> Obstacle | None:
    """Wait until nothing is in the way any more.

    Parameters
    ----------
    obstacle : callable
        Looks at what is in the way; returns None once nothing is.
    deadline : float
        Until when to wait, by ``time.monotonic``.
    cancellation : Cancellation
        Of the run that waits.
    words : callable, optional
        Says what is in the way, in a sentence for the user, who is told at the intervals of
        `Reminder`; without it nothing is said.
    reminder : Reminder, optional
        Of a wait that this is a part of; by default a new one.

    Returns
    -------
    object
        What is still in the way at the deadline, or None.

    Raises
    ------
    RunCancelled
        If the run was cancelled.
    """
    reminder = reminder or Reminder()
    while (left := obstacle()) is not None and time.monotonic() <= deadline:
        if words is not None and reminder.due():
            notify(f"Waiting: {words(left)}")
        cancellation.check()
        time.sleep(LOOK_SECONDS)
    return left
