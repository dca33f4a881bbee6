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

from distributor.core.processes import kill_group
from distributor.node.process.specs import WorkerSpec
from distributor.rank.messages import RELEASE, SECRET_BYTES


class ControlChannel:
    """A rank's connection to its agent: it ends the rank if the agent ends."""

    def __init__(self, worker_spec: WorkerSpec) -> None:
        for descriptor in worker_spec.descriptors():
            os.set_inheritable(descriptor, False)
        _die_with_parent(worker_spec.parent)
        self._socket = socket.socket(fileno=worker_spec.control)
        # Of the attempt's ranks. Unlike a variable or a command line, nothing else can read it.
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

    def read_line(self) -> bytes:
        """Return the line that belongs to the message which is being handled."""
        line = b""
        while not line.endswith(b"\n"):
            part = self._socket.recv(1)
            if not part:
                raise ConnectionError("the agent has gone")
            line += part
        return line

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
