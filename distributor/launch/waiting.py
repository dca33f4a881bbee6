"""Waiting for what Spark has no event for, such as executors that come or go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from distributor.launch.cancelling import Cancellation
from distributor.launch.console import notify

TELL_SECONDS = 5.0
LOOK_SECONDS = 0.05
"""Seconds between two looks."""

Obstacle = TypeVar("Obstacle")


def wait_out(
    obstacle: Callable[[], Obstacle | None],
    deadline: float,
    cancellation: Cancellation,
    words: Callable[[Obstacle], str] | None = None,
    *,
    again: float = math.inf,
) -> Obstacle | None:
    """Wait until nothing is in the way any more.

    Parameters
    ----------
    obstacle : callable
        Looks at what is in the way; gives None once nothing is.
    deadline : float
        Until when, by ``time.monotonic``, it is waited.
    cancellation : Cancellation
        Of the run that waits.
    words : callable, optional
        Says what is in the way, in a sentence for the user; without it nothing is told.
    again : float
        Seconds after which that is told once more.

    Returns
    -------
    object
        What is in the way still at the deadline, or None.

    Raises
    ------
    RunCancelled
        Where the run was cancelled.
    """
    tell_at = time.monotonic() + TELL_SECONDS
    while (left := obstacle()) is not None and (now := time.monotonic()) <= deadline:
        if words is not None and now > tell_at:
            notify(f"Waiting: {words(left)}")
            tell_at += again
        cancellation.check()
        time.sleep(LOOK_SECONDS)
    return left
