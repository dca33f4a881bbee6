"""Waits for the control messages of workers, and for requests of other threads."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable

from distributor.node.agent.worker_handle import WorkerHandle


class WorkerSelector:
    """Reads the control channels of a node's workers on the agent's thread.

    Parameters
    ----------
    on_message : callable
        Called with the worker and the one byte that names its message. It reads the rest of the
        message, if there is one, from the worker's control channel.
    """

    def __init__(self, on_message: Callable[[WorkerHandle, bytes], object]) -> None:
        self._on_message = on_message
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def add(self, worker: WorkerHandle) -> None:
        """Read this worker's control channel from now on."""
        self._selector.register(worker.control, selectors.EVENT_READ, worker)

    def wake(self) -> None:
        """End the current or the next `wait` at once. From any thread."""
        with contextlib.suppress(OSError):  # the agent has ended
            self._wake_sender.send(b"!")

    def wait(self, seconds: float) -> None:
        """Wait for messages, `wake` or the end of the time, and handle the messages."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
            else:
                self._read(key.data)

    def read_rest(self, worker: WorkerHandle) -> None:
        """Handle what a worker, whose process has ended, sent last; stop at its outcome."""
        worker.control.setblocking(False)
        while worker.outcome is None and self._is_registered(worker):
            self._read(worker)

    def close(self) -> None:
        """Close the selector; the workers' control channels stay open."""
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _read(self, worker: WorkerHandle) -> None:
        message = b""
        with contextlib.suppress(OSError):
            message = worker.control.recv(1)
        if message:
            self._on_message(worker, message)
        else:
            self._selector.unregister(worker.control)  # its exit code will show how it ended

    def _is_registered(self, worker: WorkerHandle) -> bool:
        return any(key.fileobj is worker.control for key in self._selector.get_map().values())
