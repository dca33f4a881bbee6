"""A Ctrl-C on the driver ends what it interrupts, although Py4J may be in the middle of a call."""

from __future__ import annotations

import functools
import logging
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from distributor._compat.pyspark import INTERRUPTED, is_pyspark_handler

P = ParamSpec("P")
R = TypeVar("R")

CALL_SECONDS = 2.0
"""Seconds for a call of Py4J to return before it is interrupted."""
RETRY_SECONDS = 0.02
"""Seconds until the interrupt is tried again."""


class Interrupts:
    """Has a Ctrl-C raise `KeyboardInterrupt` on the main thread, whatever ignores it.

    A call of Py4J has some time to return before it is interrupted: otherwise Py4J closes the
    connections of all threads, a job that another thread is submitting loses its tag, and nobody
    can cancel it. PySpark's own handler, which calls Py4J within such a call to cancel all jobs of
    the session, has no effect here. An interrupted call may raise another error, which its caller
    expects and ignores, and what a finalizer raises is only printed by Python. So `check`, and the
    end of this context, raise it again. What Py4J logs of interrupted calls is dropped.
    """

    def __init__(self) -> None:
        self._before: Callable[..., object] | None = None
        self._is_interrupted = False
        self._deadline = 0.0
        self._retry: threading.Timer | None = None
        self._is_ending = False

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if is_main else None
        if callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)
            self._print_ignored, sys.unraisablehook = sys.unraisablehook, self._ignore
            for name in INTERRUPTED:
                logging.getLogger(name).addFilter(self._is_shown)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._before:
            self._is_ending = True  # what raises from here on would keep the rest from its place
            if self._retry:
                self._retry.cancel()
                self._retry.join()  # a signal that it has sent is handled here
            if signal.getsignal(signal.SIGINT) == self._handle:
                signal.signal(signal.SIGINT, self._before)
            if sys.unraisablehook == self._ignore:
                sys.unraisablehook = self._print_ignored
            for name in INTERRUPTED:
                logging.getLogger(name).removeFilter(self._is_shown)
        if not (error and issubclass(error, KeyboardInterrupt)):
            self.check()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if one was raised before."""
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        assert self._before is not None, "it was set before"
        is_usual = self._before is signal.default_int_handler or is_pyspark_handler(self._before)
        if is_usual and self._is_ending:
            self._is_interrupted = True  # for `check`, once all is as it was
            return
        if is_usual and _is_in_py4j(frame) and self._may_wait():
            main = threading.get_ident()
            self._retry = threading.Timer(RETRY_SECONDS, signal.pthread_kill, [main, number])
            self._retry.start()
            return
        try:
            (signal.default_int_handler if is_usual else self._before)(number, frame)
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise

    def _may_wait(self) -> bool:
        if not self._is_interrupted:
            self._is_interrupted = True
            self._deadline = time.monotonic() + CALL_SECONDS
        return time.monotonic() < self._deadline

    def _ignore(self, ignored: sys.UnraisableHookArgs) -> None:
        if not (self._is_interrupted and issubclass(ignored.exc_type, KeyboardInterrupt)):
            self._print_ignored(ignored)

    def _is_shown(self, record: logging.LogRecord) -> bool:
        return not self._is_interrupted or record.msg not in INTERRUPTED.get(record.name, ())


def interruptible(function: Callable[P, R]) -> Callable[P, R]:
    """Have each call of a function be such a context."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with Interrupts():
            return function(*args, **kwargs)

    return call


def _is_in_py4j(frame: types.FrameType | None) -> bool:
    frames = (each for each, _ in traceback.walk_stack(frame))
    return any(each.f_globals.get("__name__", "").startswith("py4j.") for each in frames)
