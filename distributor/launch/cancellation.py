"""Cancellation of a run by another thread than the one that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from distributor.errors import RunCancelled


class Cancellation:
    """Requests to cancel one run. Its launcher sets the action, and checks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_requested = False
        self._action: Callable[[], object] = lambda: None

    def request(self) -> None:
        """Cancel the run. Thread-safe, and allowed at any time."""
        with self._lock:
            self._is_requested = True
            self._action()

    def set_action(self, action: Callable[[], object]) -> None:
        """Set the function that ends the run. It is called at once if that is already requested."""
        with self._lock:
            self._action = action
            if self._is_requested:
                action()

    def check(self) -> None:
        """Raise `RunCancelled` if cancellation was requested."""
        if self._is_requested:
            raise RunCancelled("The run was cancelled.")
