"""When tasks that wait for others of their run give their slots back."""

from __future__ import annotations

import random

HOLD_SECONDS = 30.0
"""Seconds without a further task after which the first round of waiting is given up."""
LONGEST_HOLD = 300.0
"""The same of a later round, at most."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
"""Seconds between the first two rounds, and at most, in the mean."""


class Gathering:
    """The rounds in which a run gathers the tasks that it needs at once.

    Two runs that each hold a part of what the other needs would wait for ever. So a round in which
    nothing comes any more is given up, and the next one begins after a pause. Each round waits
    longer, and random factors see to it that one of several runs has all slots to itself.

    Parameters
    ----------
    run_id : str
        Determines the random factors.
    now : float
        When the first round begins (seconds).
    """

    def __init__(self, run_id: str, now: float) -> None:
        self._random = random.Random(run_id)
        self._round = 0
        self._held = 0
        self._begin(now)

    def _begin(self, now: float) -> None:
        longest = min(HOLD_SECONDS * 1.5**self._round, LONGEST_HOLD)
        self._hold = longest * self._random.uniform(0.5, 1.0)
        self._held_since = now

    def note(self, held: int, now: float) -> None:
        """Note how many tasks hold slots."""
        if held > self._held or not held:
            self._held_since = now
        self._held = held

    def is_futile(self, now: float) -> bool:
        """Return whether the tasks that hold slots have waited in vain."""
        return self._held > 0 and now >= self._held_since + self._hold

    def give_back(self, now: float) -> float:
        """End the round; return the seconds of the pause before the next one."""
        pause = min(FIRST_PAUSE * 1.5**self._round, LONGEST_PAUSE) * self._random.uniform(0.5, 1.5)
        self._round += 1
        self._held = 0
        self._begin(now + pause)
        return pause
