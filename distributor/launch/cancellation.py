"""Ending a run at the word of another thread than the one that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from distributor.errors import RunCancelled


class Cancellation:
    """One run's way to be ended; its launcher says how, and checks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._action: Callable[[], object] = lambda: None

    def request(self) -> None:
        """End the run. From any thread, at any time."""
        with self._lock:
            self._requested = True
            self._action()

    def then(self, action: Callable[[], object]) -> None:
        """Have this called once the run is to end; at once where it is already."""
        with self._lock:
            self._action = action
            if self._requested:
                action()

    def check(self) -> None:
        """Raise `RunCancelled` where the run is to end."""
        if self._requested:
            raise RunCancelled("The run was cancelled.")
