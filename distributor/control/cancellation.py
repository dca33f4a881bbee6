"""Cancellation of a run by another thread than the one that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from distributor.errors import RunCancelled


class Cancellation:
    """Requests to cancel one run. Its launcher sets the action, and checks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = threading.Event()
        self._action: Callable[[], object] = lambda: None

    def request(self) -> None:
        """Cancel the run. Thread-safe, and allowed at any time."""
        with self._lock:
            self._requested.set()
            self._action()

    def set_action(self, action: Callable[[], object]) -> None:
        """Set the function that ends the run. It is called at once if that is already requested."""
        with self._lock:
            self._action = action
            if self._requested.is_set():
                action()

    def check(self) -> None:
        """Raise `RunCancelled` if cancellation was requested."""
        if self._requested.is_set():
            raise RunCancelled("The run was cancelled.")

    def pause(self, seconds: float) -> None:
        """Wait for some seconds; raise `RunCancelled` as soon as cancellation is requested."""
        self._requested.wait(seconds)
        self.check()
