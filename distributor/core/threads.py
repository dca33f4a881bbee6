"""Messages between threads, and calls on threads that the exit of Python does not wait for."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class MessageQueue(Generic[T]):
    """A queue with one reader. Any thread and any handler of a signal may write to it."""

    # SimpleQueue.get(timeout=...) waits for ever if the handler of a signal returns after the
    # time-out: it passes what is left, a negative number, on as no limit (seen in Python 3.11).
    # queue.Queue is not for handlers.

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = threading.Lock()  # free after a write, until the reader looks
        self._filled.acquire()

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._filled.locked():
            with contextlib.suppress(RuntimeError):  # another write has released it
                self._filled.release()

    def get(self, timeout: float) -> T:
        """Wait for the next item; raises ``queue.Empty`` after the time-out."""
        deadline = time.monotonic() + timeout
        while not self._items:
            left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            if not self._filled.acquire(timeout=left) and not self._items:
                raise queue.Empty
        return self._items.popleft()


def in_background(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function on a daemon thread of this name, and return its future."""
    called: Future[T] = Future()

    def call() -> None:
        try:
            called.set_result(function())
        except Exception as error:
            called.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return called
