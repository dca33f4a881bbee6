"""What becomes of a run when this process is asked to end: its ranks first have a chance."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Literal

from distributor.errors import RunCancelled
from distributor.launch.console import notify

CHANCE_SECONDS = 300.0
"""Seconds for the ranks to report a checkpoint; whoever asked may kill this process sooner."""


class Preemption:
    """One run's way to tell its ranks that they are about to end; a context manager.

    In it, on the main thread and where nobody else handles it, a first SIGTERM is passed on to the
    ranks if any of them heeds notices. When they have reported a checkpoint, or the time is over,
    the run is ended, and then this process by the same signal. A second SIGTERM ends it at once.
    """

    def __init__(self) -> None:
        self._tell: Callable[[], object] = lambda: None
        self._subscribed = False
        self._stage: Literal["calm", "asked", "told", "over"] = "calm"
        self._until = 0.0

    @property
    def subscribed(self) -> bool:
        """Whether a rank wants to be told."""
        return self._subscribed

    @property
    def sigterm_received(self) -> bool:
        """Whether this process was asked to end."""
        return self._stage != "calm"

    def through(self, tell: Callable[[], object]) -> None:
        """Have the ranks of an attempt, which begins, told by this; from the thread that waits."""
        self._tell, self._subscribed = tell, False

    def between_attempts(self) -> None:
        """Note that there are no ranks now."""
        self.through(lambda: None)

    def subscribe(self) -> None:
        """Note that a rank wants to be told."""
        self._subscribed = True

    def __enter__(self) -> Preemption:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.sigterm_received:
            _end()

    def advance(self) -> None:
        """Take the step that is due; called again and again by the thread that waits.

        Raises
        ------
        RunCancelled
            Once, where the ranks have had their time.
        """
        if self._stage == "asked":
            self._stage = "told"
            self._until = time.monotonic() + CHANCE_SECONDS
            notify(
                "SIGTERM: the ranks are told, and this process ends when they have then reported a "
                f"checkpoint, for which they have {CHANCE_SECONDS:.0f} s. A second one ends it at "
                "once."
            )
            self._tell()
        elif self._stage == "told" and time.monotonic() > self._until:
            self._give_up("the ranks have reported no checkpoint")

    def saved(self) -> None:
        """Note that ranks that had been told have reported a checkpoint.

        Raises
        ------
        RunCancelled
            Where it was waited for.
        """
        if self._stage == "told":
            self._give_up("a checkpoint is there to go on from")

    def _give_up(self, why: str) -> None:
        self._stage = "over"
        raise RunCancelled(f"This process was asked to end by SIGTERM; {why}.")

    def _handle(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._subscribed:
            _end()
        self._stage = "asked"


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
