"""The control channel between a rank and its agent, at the rank's end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping

from distributor.node.process.signals import kill_group
from distributor.node.process.worker_spec import WorkerSpec

STARTED, VALUE, FAILURE, EXIT = b"S", b"V", b"F", b"X"
"""What a rank sends: that work begins, and how it ended; an exit with its code."""
SUBSCRIBED, IGNORES_SIGTERM, SIGTERM_RECEIVED = b"H", b"D", b"A"
"""And, if it heeds notices: that it does, that SIGTERM alone no longer ends it, that one came."""
RELEASE, MANY_LINES, NOTICE = b"R", b"M", b"N"
"""What it is told: to leave, that it prints very many lines, that the run is to lose a process."""


class ControlChannel:
    """Holds on to the agent: no rank outlives its agent, or leaves before it may.

    Parameters
    ----------
    worker_spec : WorkerSpec
        What the agent wants of this rank.
    on : mapping of bytes to callable
        What is called at a word of the agent.
    """

    def __init__(self, worker_spec: WorkerSpec, on: Mapping[bytes, Callable[[], object]]) -> None:
        for descriptor in worker_spec.descriptors():
            os.set_inheritable(descriptor, False)
        _die_with_parent(worker_spec.parent)
        self._socket = socket.socket(fileno=worker_spec.control)
        self._on = on
        self._released = threading.Event()
        threading.Thread(target=self._watch, name="control-channel", daemon=True).start()

    def tell(self, what: bytes) -> None:
        """Tell the agent how far this rank has come."""
        self._socket.sendall(what)

    def await_release(self) -> None:
        """Wait until this rank may leave."""
        self._released.wait()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while told := self._socket.recv(1):  # until the agent has closed its end, or is gone
                if told == RELEASE:
                    self._released.set()
                else:
                    with contextlib.suppress(RuntimeError):  # there can be no more threads
                        self._on[told]()
        if not self._released.is_set():
            kill_group(os.getpgid(0))


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)
