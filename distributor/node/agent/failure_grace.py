"""When to stop the ranks that still run after one of them has failed."""

from __future__ import annotations

import time

from distributor.serialization.outcome import Failure

AFTER_CAUSE_SECONDS = 0.5
"""Seconds in which other ranks may fail on their own, after a failure that looks like a cause."""
AFTER_COLLATERAL_SECONDS = 5.0
"""The same after a failure that looks like a consequence of another one, which is still unknown."""
LATE_START_SECONDS = 10.0
"""Additional seconds while some ranks are still starting: they may have the same fault."""


class FailureGracePeriod:
    """The time between the first failure of a run and the stop of the ranks that still run.

    All ranks that fail at the same time for the same reason should be reported, and a lost
    connection is often noticed before the death that caused it.

    Parameters
    ----------
    expected : int
        Number of participants (ranks or nodes) that have to start.
    head_start : float
        Seconds that another observer, which sees more of the run, has to decide first.
    """

    def __init__(self, expected: int, head_start: float = 0.0) -> None:
        self._expected = expected
        self._head_start = head_start
        self._started: set[int] = set()
        self._due_at: float | None = None

    def expect(self, count: int) -> None:
        """Correct the number of participants: only so many can report their start."""
        self._expected = count

    def note_start(self, number: int) -> None:
        """Note that a participant has started."""
        self._started.add(number)
        if self._due_at is not None:
            self._due_at = max(self._due_at, self._in(AFTER_CAUSE_SECONDS))

    def note_failure(self, failure: Failure) -> None:
        """Note a failure."""
        seconds = AFTER_COLLATERAL_SECONDS if failure.collateral else AFTER_CAUSE_SECONDS
        due_at = self._in(seconds)
        self._due_at = due_at if self._due_at is None else min(self._due_at, due_at)

    def is_over(self) -> bool:
        """Return whether the other ranks have to be stopped now."""
        if self._due_at is None:
            return False
        all_started = len(self._started) >= self._expected
        return time.monotonic() >= self._due_at + (0.0 if all_started else LATE_START_SECONDS)

    def _in(self, seconds: float) -> float:
        return time.monotonic() + self._head_start + seconds
