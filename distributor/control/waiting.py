"""The driver's waits: what ends them early (cancellation, Ctrl-C, SIGTERM), and their messages.

On SIGTERM the ranks may report a checkpoint before the process ends. Changes for which Spark has no
event, such as executors that come or go, are polled for.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from distributor._compat.pyspark import INTERRUPTED, is_pyspark_handler
from distributor.errors import RunCancelled
from distributor.screen.messages import notify


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


P = ParamSpec("P")
R = TypeVar("R")
Obstacle = TypeVar("Obstacle")

REMINDER_SECONDS = 5.0
"""Seconds until the first message about a wait; each further interval is twice as long."""
MAX_REMINDER_SECONDS = 60.0
"""The longest interval between two messages about one wait."""
POLL_SECONDS = 0.05
"""Seconds between two polls."""


class Reminder:
    """Shows messages about a wait: after 5 s, then 10, 20, 40 and 60 s later, and none twice."""

    def __init__(self) -> None:
        self._interval = REMINDER_SECONDS
        self._due_at = time.monotonic() + self._interval
        self._shown = ""

    def show(self, describe: Callable[[], str]) -> None:
        """Show a message if one is due, unless it is the same as the last one."""
        if (now := time.monotonic()) < self._due_at:
            return
        self._interval = min(2 * self._interval, MAX_REMINDER_SECONDS)
        self._due_at = now + self._interval
        if (text := describe()) != self._shown:
            self._shown = text
            notify(f"Waiting: {text}")


def poll_until(
    obstacle: Callable[[], Obstacle | None],
    deadline: float,
    cancellation: Cancellation,
    describe: Callable[[Obstacle], str] | None = None,
    reminder: Reminder | None = None,
) -> Obstacle | None:
    """Wait until there is no obstacle."""
    reminder = reminder or Reminder()
    while (left := obstacle()) is not None and time.monotonic() <= deadline:
        if describe is not None:
            reminder.show(functools.partial(describe, left))
        cancellation.check()
        time.sleep(POLL_SECONDS)
    return left


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


CHECKPOINT_TIMEOUT = 300.0
"""Seconds for the ranks to report a checkpoint. The sender of SIGTERM may send SIGKILL sooner."""


class _State(enum.Enum):
    RUNNING = enum.auto()
    SIGTERM_RECEIVED = enum.auto()
    RANKS_NOTIFIED = enum.auto()
    ENDING = enum.auto()


class GracefulShutdown:
    """Passes a SIGTERM of this process on to a run's ranks; a context manager.

    It handles SIGTERM on the main thread, if the signal has its default action. On the first
    SIGTERM the ranks receive a preemption notice, if any rank has subscribed to notices. Once they
    have reported a checkpoint, or after `CHECKPOINT_TIMEOUT`, the run ends, and then this process
    ends by the same signal. A second SIGTERM ends the process at once.

    A Ctrl-C on the main thread ends the run; see `Interrupts`.
    """

    def __init__(self) -> None:
        self._notify_ranks: Callable[[], object] = lambda: None
        self.is_subscribed = False
        """Whether a rank has subscribed to preemption notices."""
        self._state = _State.RUNNING
        self._deadline = 0.0
        self._interrupts = Interrupts()

    @property
    def sigterm_received(self) -> bool:
        """Whether this process has received SIGTERM."""
        return self._state is not _State.RUNNING

    def start_attempt(self, notify_ranks: Callable[[], object]) -> None:
        """Set how the ranks of a new attempt are notified. Called by the thread that waits."""
        self._notify_ranks, self.is_subscribed = notify_ranks, False

    def end_attempt(self) -> None:
        """Record that there are no ranks until the next attempt."""
        self.start_attempt(lambda: None)

    def subscribe(self) -> None:
        """Record that a rank has subscribed to preemption notices."""
        self.is_subscribed = True

    def __enter__(self) -> GracefulShutdown:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
        self._interrupts.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.sigterm_received:
            _terminate()
        self._interrupts.__exit__(*exc_info)

    def advance(self) -> None:
        """Take the next step if it is due. Called repeatedly by the thread that waits."""
        self._interrupts.check()
        if self._state is _State.SIGTERM_RECEIVED:
            self._state = _State.RANKS_NOTIFIED
            self._deadline = time.monotonic() + CHECKPOINT_TIMEOUT
            notify(
                "Received SIGTERM: the ranks are notified, and this process ends once they have "
                f"reported a checkpoint, or after {CHECKPOINT_TIMEOUT:.0f} s. Send SIGTERM again "
                "to end it at once."
            )
            self._notify_ranks()
        elif self._state is _State.RANKS_NOTIFIED and time.monotonic() > self._deadline:
            self._end_run("the ranks have not reported a checkpoint in time")

    def checkpoint_reported(self) -> None:
        """Record that notified ranks have reported a checkpoint."""
        if self._state is _State.RANKS_NOTIFIED:
            self._end_run("the ranks have reported a checkpoint to resume from")

    def _end_run(self, why: str) -> None:
        self._state = _State.ENDING
        raise RunCancelled(f"This process received SIGTERM; {why}.")

    def _handle(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self.is_subscribed:
            _terminate()
        self._state = _State.SIGTERM_RECEIVED


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
