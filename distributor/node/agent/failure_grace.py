"""When to stop the ranks that still run after one of them failed."""

from __future__ import annotations

import time

from distributor.serialization.outcome import Failure

CAUSE_SECONDS = 0.5
"""Seconds that others have to fail by themselves after a failure that looks like a cause."""
ECHO_SECONDS = 5.0
"""The same after one that looks like the echo of another rank's, whose cause must be found."""
START_SECONDS = 10.0
"""Seconds that those who are still starting have beyond that: they may have the same fault."""


class FailureGracePeriod:
    """Decides when enough is known of a failure to stop what still runs.

    Whoever failed at the same time for the same reason should be heard too, and a lost connection
    is often noticed before the death that caused it.

    Parameters
    ----------
    expected : int
        How many have to start.
    patience : float
        Seconds that another judge, with a wider view, has to decide first.
    """

    def __init__(self, expected: int, patience: float = 0.0) -> None:
        self._expected = expected
        self._patience = patience
        self._started: set[int] = set()
        self._due_at: float | None = None

    def expect(self, count: int) -> None:
        """Correct how many have to start: only so many can tell."""
        self._expected = count

    def started(self, number: int) -> None:
        """Note that one of those expected has started."""
        self._started.add(number)
        if self._due_at is not None:
            self._due_at = max(self._due_at, self._in(CAUSE_SECONDS))

    def failed(self, failure: Failure) -> None:
        """Note a failure."""
        due_at = self._in(ECHO_SECONDS if failure.collateral else CAUSE_SECONDS)
        self._due_at = due_at if self._due_at is None else min(self._due_at, due_at)

    def over(self) -> bool:
        """Tell whether the time has come to stop the others."""
        if self._due_at is None:
            return False
        all_started = len(self._started) >= self._expected
        return time.monotonic() >= self._due_at + (0.0 if all_started else START_SECONDS)

    def _in(self, seconds: float) -> float:
        return time.monotonic() + self._patience + seconds
