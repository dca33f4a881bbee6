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
"""Messages of a rank: work begins, and how it ended. The byte after ``EXIT`` is the exit code."""
SUBSCRIBED, IGNORES_SIGTERM, SIGTERM_RECEIVED = b"H", b"D", b"A"
"""Messages of a rank about preemption: it subscribed to notices, SIGTERM alone no longer ends it,
and a SIGTERM has come."""
RELEASE, MANY_LINES, COLLECTIVES, NOTICE, NOTICE_HERE = b"R", b"M", b"C", b"N", b"P"
"""Messages of the agent: the rank may leave, it prints very many lines, it is to write down its
last collectives, and the run is about to lose a process, on another host or on this one."""


SECRET_BYTES = 32


class ControlChannel:
    """A rank's connection to its agent: it ends the rank if the agent ends.

    Parameters
    ----------
    worker_spec : WorkerSpec
        What the agent passed to this rank.

    Attributes
    ----------
    secret : bytes
        The secret of the attempt's ranks, with which the agent begins. Unlike an environment
        variable or a command line, nothing else can read it.
    """

    def __init__(self, worker_spec: WorkerSpec) -> None:
        for descriptor in worker_spec.descriptors():
            os.set_inheritable(descriptor, False)
        _die_with_parent(worker_spec.parent)
        self._socket = socket.socket(fileno=worker_spec.control)
        self.secret = self._socket.recv(SECRET_BYTES, socket.MSG_WAITALL)
        self._released = threading.Event()

    def listen(self, handlers: Mapping[bytes, Callable[[], object]]) -> None:
        """Start a thread that calls the handler of each message from the agent."""
        threading.Thread(
            target=self._serve, args=[handlers], name="control-channel", daemon=True
        ).start()

    def send(self, message: bytes) -> None:
        """Send a message to the agent."""
        self._socket.sendall(message)

    def await_release(self) -> None:
        """Wait until this rank may leave."""
        self._released.wait()

    def _serve(self, handlers: Mapping[bytes, Callable[[], object]]) -> None:
        with contextlib.suppress(OSError):
            while message := self._socket.recv(1):  # until the agent has closed its end, or is gone
                if message == RELEASE:
                    self._released.set()
                else:
                    with contextlib.suppress(RuntimeError):  # no further thread can be started
                        handlers[message]()
        if not self._released.is_set():
            kill_group(os.getpgid(0))


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request to the kernel
        os._exit(1)
