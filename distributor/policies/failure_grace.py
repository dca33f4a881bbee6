"""When to stop the ranks that still run after one of them has failed."""

from __future__ import annotations

from distributor.serialization.outcome import Failure

AFTER_CAUSE_SECONDS = 0.5
"""Seconds in which other ranks may fail on their own, after a failure that looks like a cause."""
AFTER_COLLATERAL_SECONDS = 5.0
"""The same after a failure that looks like a consequence of another one, which is still unknown."""
LATE_START_SECONDS = 10.0
"""Additional seconds while some ranks are still starting: they may have the same fault."""
DRIVER_FIRST_SECONDS = AFTER_CAUSE_SECONDS + AFTER_COLLATERAL_SECONDS + LATE_START_SECONDS
"""Seconds in which the driver, which sees all nodes, decides before a node does."""


class FailureGracePeriod:
    """The time between the first failure of a run and the stop of the ranks that still run.

    All ranks that fail at the same time for the same reason should be reported, and a lost
    connection is often noticed before the death that caused it.

    Parameters
    ----------
    expected : int
        Number of participants (ranks or nodes) that have to start.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._started: set[int] = set()
        self._due_at: float | None = None

    def note_start(self, number: int, now: float) -> None:
        self._started.add(number)
        if self._due_at is not None:
            self._due_at = max(self._due_at, now + AFTER_CAUSE_SECONDS)

    def note_failure(self, failure: Failure, now: float) -> None:
        seconds = AFTER_COLLATERAL_SECONDS if failure.collateral else AFTER_CAUSE_SECONDS
        due_at = now + seconds
        self._due_at = due_at if self._due_at is None else min(self._due_at, due_at)

    def is_over(self, now: float) -> bool:
        if self._due_at is None:
            return False
        all_started = len(self._started) >= self._expected
        return now >= self._due_at + (0.0 if all_started else LATE_START_SECONDS)
