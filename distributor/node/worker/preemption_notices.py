"""Preemption notices inside a rank: the run is about to lose a process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from distributor.node.worker.control_channel import IGNORES_SIGTERM, SIGTERM_RECEIVED, SUBSCRIBED


class PreemptionNotices:
    """Passes on the notices that a rank receives, and makes it survive a first SIGTERM.

    That SIGTERM is a notice, too: the agent sends it on to all ranks.

    Parameters
    ----------
    send : callable or None
        Sends a message to the rank's agent; None outside a rank.
    """

    def __init__(self, send: Callable[[bytes], object] | None) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._notices: list[bool] = []
        self._callbacks: list[Callable[[bool], object]] = []

    def notify(self, here: bool) -> None:
        """Receive a notice. Can be called from any thread.

        Parameters
        ----------
        here : bool
            Whether the process is on this rank's host.
        """
        with self._lock:
            self._notices.append(here)
            for callback in self._callbacks:
                callback(here)

    def subscribe(self, callback: Callable[[bool], object]) -> None:
        """Call `callback` with `here` for each notice, also for those that have come already."""
        with self._lock:
            self._callbacks.append(callback)
            for here in self._notices:
                callback(here)
        self._send_if_rank(SUBSCRIBED)
        self._survive_sigterm()

    def _send_if_rank(self, message: bytes) -> None:
        if self._send is not None:
            self._send(message)

    def _survive_sigterm(self) -> None:
        """Take the first SIGTERM as a notice, unless the program has a handler of its own."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._send_if_rank(IGNORES_SIGTERM)
            signal.signal(signal.SIGTERM, self._on_sigterm)
            os.register_at_fork(after_in_child=self._restore_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self._restore_sigterm()
        self._send_if_rank(SIGTERM_RECEIVED)

    def _restore_sigterm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
