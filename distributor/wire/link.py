"""A node's connection to the driver's hub: one thread reads, one sends, and callers do not wait."""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from distributor.wire import protocol
from distributor.wire.connection import connect
from distributor.wire.messages import Heartbeat

_CHUNK = 256 * 2**10  # bytes per call of the kernel, small enough that the backlog shrinks visibly

_log = logging.getLogger(__name__)


class Link:
    """An authenticated connection to a hub; use `Link.connect`."""

    def __init__(
        self,
        sock: socket.socket,
        session: protocol.Session,
        on_message: Callable[[object], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.lost = False  # ended without a call of `close`, or before all messages were sent
        self._sock = sock
        self._session = session
        self._on_message = on_message
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._frames: collections.deque[protocol.Frame] = collections.deque()
        self._backlog = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._send_all, name="distributor-link-sender", daemon=True),
            threading.Thread(target=self._read_all, name="distributor-link-reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        secret: bytes,
        node: int,
        *,
        timeout: float,
        handshake_timeout: float | None = None,
        on_message: Callable[[object], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> Link:
        """Connect to a hub as ``node``, with authentication in both directions.

        The reader's thread calls ``on_message``, perhaps before this returns, also with heartbeats;
        if it raises, the link is lost. Unless `close` ended the link, ``on_lost`` is called last.
        """
        sock, session = connect(
            host, port, secret, node, timeout=timeout, handshake_timeout=handshake_timeout
        )
        try:
            return cls(sock, session, on_message, on_lost)
        except BaseException:
            sock.close()
            raise

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: object) -> None:
        """Queue a message for the sender's thread; it is dropped if the link is lost or closed."""
        if self.lost or self._closing:
            return
        frame = protocol.encode(message)
        with self._changed:
            if not (self.lost or self._closing):
                self._frames.append(frame)
                self._backlog += sum(map(len, frame))
                self._changed.notify_all()

    def backlog(self) -> int:
        return self._backlog

    def wait_below(self, limit: int, timeout: float) -> bool:
        """Wait until the backlog is below ``limit`` bytes; False on timeout or a lost link."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost or self._backlog < limit, timeout)
            return not self.lost and self._backlog < limit

    def close(self, timeout: float = 5.0) -> None:
        """Send what is queued, and wait until the hub closes in answer, at most ``timeout``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        self._join(deadline)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in the socket
        self._join(max(deadline, time.monotonic() + 1.0))
        self._sock.close()

    def _join(self, deadline: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _send_all(self) -> None:
        try:
            while frame := self._next_frame():
                self._send_frame(frame)
            # The hub closes in answer. An immediate close() could cut off data in transit.
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._lose()

    def _send_frame(self, frame: protocol.Frame) -> None:
        tag = self._session.sent.next(*frame)
        if (size := sum(map(len, frame))) <= _CHUNK:
            self._sock.sendall(b"".join((*frame, tag)))
            self._shorten_backlog(size)
            return
        for part in frame:
            for start in range(0, len(part), _CHUNK):
                chunk = memoryview(part)[start : start + _CHUNK]
                self._sock.sendall(chunk)
                self._shorten_backlog(len(chunk))
        self._sock.sendall(tag)

    def _shorten_backlog(self, size: int) -> None:
        with self._changed:
            self._backlog -= size
            self._changed.notify_all()

    def _next_frame(self) -> protocol.Frame | None:
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._closing or self.lost)
            return self._frames.popleft() if self._frames else None

    def _read_all(self) -> None:
        try:
            with self._sock.makefile("rb") as stream:
                while payload := self._next_payload(stream):
                    message = protocol.decode(payload)
                    if isinstance(message, Heartbeat):
                        self.send(message)
                    self._on_message(message)
        except (protocol.FrameNotAuthentic, protocol.FrameTooLarge) as error:
            _log.warning("the link to the driver is closed: %s", error)
        except Exception:
            _log.warning("a message from the hub could not be handled", exc_info=True)
        with self._changed:
            asked_for = self._closing
        if self._backlog or not asked_for:
            self._lose()
        if not asked_for:
            self._on_lost()

    def _next_payload(self, stream: BinaryIO) -> memoryview:
        """Return the next frame's payload; empty if the connection has ended."""
        nothing = memoryview(b"")
        try:
            header = stream.read(protocol.HEADER.size)
            if len(header) < protocol.HEADER.size:
                return nothing
            rest = protocol.check_length(protocol.HEADER.unpack(header)[0]) + protocol.TAG_SIZE
            received = memoryview(stream.read(rest))
        except protocol.FrameTooLarge:
            raise
        except OSError:
            return nothing
        if len(received) < rest:
            return nothing
        content, tag = received[: -protocol.TAG_SIZE], received[-protocol.TAG_SIZE :]
        self._session.received.check(tag, header, content)
        return content

    def _lose(self) -> None:
        with self._changed:
            self.lost = True
            self._frames.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
