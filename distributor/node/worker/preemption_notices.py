"""Preemption notices inside a rank: the run is about to lose a process.

A rank that heeds notices outlives a first SIGTERM, which is one, too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from distributor.node.worker.control_channel import IGNORES_SIGTERM, SIGTERM_RECEIVED, SUBSCRIBED

_lock = threading.Lock()
_told = 0
_hear: Callable[[], object] | None = None
_tell: Callable[[bytes], object] | None = None


def tell_over(tell: Callable[[bytes], object]) -> None:
    """Have this rank's agent told so."""
    global _tell
    _tell = tell


def can_be_heard() -> bool:
    """Tell whether this is a rank."""
    return _tell is not None


def note() -> None:
    """Take a notice. From any thread."""
    global _told
    with _lock:
        _told += 1
        if _hear is not None:
            _hear()


def subscribe(hear: Callable[[], object]) -> None:
    """Have this called for each notice, of those that came before, too."""
    global _hear
    with _lock:
        _hear = hear
        for _ in range(_told):
            hear()
    _say(SUBSCRIBED)
    _outlive_sigterm()


def _say(word: bytes) -> None:
    if _tell is not None:
        _tell(word)


def _outlive_sigterm() -> None:
    """Take the first SIGTERM as a notice, unless the program has a handler of its own."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _say(IGNORES_SIGTERM)
        signal.signal(signal.SIGTERM, _asked)
        os.register_at_fork(after_in_child=_be_mortal)


def _asked(*_: object) -> None:
    _be_mortal()
    _say(SIGTERM_RECEIVED)


def _be_mortal() -> None:
    if signal.getsignal(signal.SIGTERM) is _asked:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
