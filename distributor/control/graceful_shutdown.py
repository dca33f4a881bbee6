"""Signals to a driver: on SIGTERM its ranks may report a checkpoint before the process ends."""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from distributor.control.interrupts import Interrupts
from distributor.errors import RunCancelled
from distributor.screen.messages import notify

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
        self._is_subscribed = False
        self._state = _State.RUNNING
        self._deadline = 0.0
        self._interrupts = Interrupts()

    @property
    def is_subscribed(self) -> bool:
        """Whether a rank has subscribed to preemption notices."""
        return self._is_subscribed

    @property
    def sigterm_received(self) -> bool:
        """Whether this process has received SIGTERM."""
        return self._state is not _State.RUNNING

    def start_attempt(self, notify_ranks: Callable[[], object]) -> None:
        """Set how the ranks of a new attempt are notified. Called by the thread that waits."""
        self._notify_ranks, self._is_subscribed = notify_ranks, False

    def end_attempt(self) -> None:
        """Record that there are no ranks until the next attempt."""
        self.start_attempt(lambda: None)

    def subscribe(self) -> None:
        """Record that a rank has subscribed to preemption notices."""
        self._is_subscribed = True

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
        if not self._is_subscribed:
            _terminate()
        self._state = _State.SIGTERM_RECEIVED


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
