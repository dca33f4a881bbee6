"""How long the start of ranks is waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

CHECK_SECONDS = 0.1
"""Seconds between two checks whether the run goes on."""


@dataclass(frozen=True)
class StartLimit:
    """How long the start of ranks is waited for.

    Parameters
    ----------
    deadline : float
        When, by ``time.monotonic``, the wait ends.
    check : callable
        Called again and again meanwhile; raises an exception if the run has ended.
    """

    deadline: float = math.inf
    check: Callable[[], object] = lambda: None

    def intervals(self) -> Iterator[float]:
        """Yield how many seconds to wait for next, until the deadline has passed."""
        while (left := self.deadline - time.monotonic()) > 0:
            self.check()
            yield min(left, CHECK_SECONDS)
