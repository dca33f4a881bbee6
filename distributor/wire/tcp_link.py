"""A node's link to the driver's hub over TCP, with the lease that ends with the driver."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from distributor.serialization.outcome import Value
from distributor.wire import protocol
from distributor.wire.messages import Heartbeat, ValuePart, ValueReceived, ValueRefused, ValueStart
from distributor.wire.node_link import MAX_BACKLOG, Delivery

CLOSE_SECONDS = 5.0
"""Seconds to send what is queued when a link is closed."""
_CHUNK = 256 * 2**10  # bytes per call of the kernel, small enough that the backlog shrinks visibly

_log = logging.getLogger(__name__)


def _connect(
    host: str,
    port: int,
    secret: bytes,
    node: int,
    timeout: float,
    handshake_timeout: float | None,
) -> tuple[socket.socket, protocol.Session]:
    """Connect as ``node`` to the run with this secret; return a blocking socket and its session."""
    limit = timeout
    try:
        sock = _dial(host, port, time.monotonic() + timeout)
        try:
            # The kernel accepts connections for a listener that is too busy to answer at once.
            limit = handshake_timeout or timeout
            session = _prove(sock, secret, node, time.monotonic() + limit)
        except BaseException:
            sock.close()
            raise
    except TimeoutError as error:
        raise TimeoutError(f"no hub answers at {host}:{port} within {limit:g} s") from error
    sock.settimeout(None)
    return sock, session


def _is_served(host: str, port: int, secret: bytes, *, timeout: float) -> bool:
    """Ask what listens at an address whether it serves the run with this secret.

    False: it says nothing; it is stopped, too busy or not the hub. RunNotServed: certainly not.
    """
    with _dial(host, port, time.monotonic() + timeout) as sock:
        try:
            _prove(sock, secret, protocol.PROBE, time.monotonic() + timeout)
        except TimeoutError:
            return False
    return True


def _dial(host: str, port: int, deadline: float) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    *others, last = [str(address[0]) for *_, address in found]
    for tried, address in enumerate(others):
        # Each address gets a share of the time, in case one drops packets silently.
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), _left(deadline) / (len(found) - tried))
    return socket.create_connection((last, port), _left(deadline))


def _prove(sock: socket.socket, secret: bytes, node: int, deadline: float) -> protocol.Session:
    protocol.tune(sock)
    nonce = os.urandom(protocol.NONCE_SIZE)
    greeting = _receive(sock, protocol.GREETING.size, deadline)
    sock.sendall(protocol.hello(secret, greeting, nonce, node))
    welcome = _receive(sock, protocol.WELCOME.size, deadline)
    return protocol.check_welcome(secret, greeting, nonce, welcome)


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        sock.settimeout(_left(deadline))
        part = sock.recv(size - len(received))
        if not part:
            raise protocol.HandshakeRefused("the hub hung up: a wrong secret, or a node twice")
        received += part
    return received


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class Link:
    """A connection to a hub as ``node``, with authentication in both directions.

    The reader's thread calls ``on_message``, perhaps before the constructor returns, also with
    heartbeats; if it raises, the link is lost. Unless `close` ended the link, ``on_lost`` is called
    last.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        node: int,
        *,
        timeout: float,
        handshake_timeout: float | None = None,
        on_message: Callable[[object], object],
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.lost = False  # ended without a call of `close`, or before all messages were sent
        self._sock, self._session = _connect(host, port, secret, node, timeout, handshake_timeout)
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
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._sock.close()
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

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
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


CHECK_SECONDS = 5.0
"""Seconds between two connections that check a driver, and for each of them to be accepted.

The driver is checked once it has been silent for twice as long.
"""
SILENCE_SECONDS = 300.0
"""Seconds for which what listens at the hub's address may say nothing once the link is lost."""


class DriverLease:
    """Expires when the driver cannot be reached for a while, or is known to be gone.

    Neither a lost link nor silence makes it expire. As long as what listens at the hub's address
    proves that it serves the run, the driver lives, and the run goes on (through Spark if the link
    is lost). A driver that is stopped, too busy or out of descriptors cannot prove anything. The
    kernel keeps its connections: as long as the link exists, it lives. Once the link is lost,
    another program may listen there, so that the lease then ends after a while.

    Parameters
    ----------
    hub : tuple of str and int
        The address and port of the driver's hub.
    secret : bytes
        The run's secret.
    on_expired : callable
        Called once, on the lease's own thread, with the reason.
    """

    def __init__(
        self, hub: tuple[str, int], secret: bytes, on_expired: Callable[[str], object]
    ) -> None:
        self._hub = hub
        self._secret = secret
        self._on_expired = on_expired
        self._renewed_at = self._proved_at = time.monotonic()
        self._link_lost = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="distributor-lease", daemon=True)

    def start(self) -> None:
        """Start to watch the driver."""
        self.renew()
        self._thread.start()

    def renew(self) -> None:
        """Note that the driver has just sent a message."""
        self._renewed_at = self._proved_at = time.monotonic()

    def link_lost(self) -> None:
        """Note that the link is lost: from now on, connect to the hub's address to check it."""
        with self._changed:
            self._link_lost = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop to watch: the lease never expires after this."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch(self) -> None:
        while not self._closed:
            silent = time.monotonic() > self._renewed_at + 2 * CHECK_SECONDS
            if (self._link_lost or silent) and self._is_driver_gone():
                self._expire("The driver is gone")
            elif time.monotonic() > self._renewed_at + protocol.DRIVER_LEASE_SECONDS:
                seconds = protocol.DRIVER_LEASE_SECONDS
                self._expire(f"The driver could not be reached for {seconds:g} s")
            self._wait(self._link_lost)

    def _wait(self, lost_before: bool) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._link_lost != lost_before, CHECK_SECONDS
            )

    def _expire(self, reason: str) -> None:
        with self._changed:
            expired, self._closed = not self._closed, True
        if expired:
            self._on_expired(reason)

    def _is_driver_gone(self) -> bool:
        """Return whether the driver certainly does not listen; renew the lease if it may."""
        try:
            proved = _is_served(*self._hub, self._secret, timeout=CHECK_SECONDS)
        except (ConnectionRefusedError, protocol.RunNotServed):
            return True
        except OSError:
            return False  # the network is partitioned, or the driver overloaded; it may recover
        if proved:
            self.renew()
        elif not self._link_lost or time.monotonic() < self._proved_at + SILENCE_SECONDS:
            self._renewed_at = time.monotonic()
        return False


CONNECT_SECONDS = 5.0
"""Seconds to connect to the hub, after which a node goes on without a link."""
HANDSHAKE_SECONDS = 20.0
"""Seconds for the hub's answer, which a driver whose interpreter is busy gives late."""
STALL_SECONDS = 60.0
"""Seconds without progress after which a value goes another way."""


class TcpLink(Link):
    """A node's link to the hub, with its lease.

    Parameters
    ----------
    hub : tuple of str and int
        The hub's address and port.
    secret : bytes
        The run's secret.
    node : int
        The node's number.
    on_message : callable
        Called with each message of the driver, on the link's thread.
    on_lost : callable
        Called once if the link is lost.
    on_driver_lost : callable
        Called once, with the reason, if the driver is gone or could not be reached for too long.

    Raises
    ------
    OSError
        If the hub cannot be reached, or does not prove that it holds the run's secret.
    """

    def __init__(
        self,
        hub: tuple[str, int],
        secret: bytes,
        node: int,
        on_message: Callable[[object], object],
        on_lost: Callable[[], object],
        on_driver_lost: Callable[[str], object],
    ) -> None:
        self._pass_on = on_message
        self._note_lost = on_lost
        self._received: set[int] = set()
        self._refused: dict[int, int] = {}
        self._lease = DriverLease(hub, secret, on_driver_lost)
        super().__init__(
            *hub,
            secret,
            node,
            timeout=CONNECT_SECONDS,
            handshake_timeout=HANDSHAKE_SECONDS,
            on_message=self._receive,
            on_lost=self._handle_lost,
        )
        self._lease.start()

    def has_room(self) -> bool:
        return self.backlog() < MAX_BACKLOG

    def deliver(self, values: Sequence[Value]) -> Delivery:
        sent = {value.rank for value in values if self._send_value(value)}
        with self._changed:
            self._changed.wait_for(
                lambda: self.lost or sent <= self._received | self._refused.keys(), STALL_SECONDS
            )
            return Delivery(frozenset(sent & self._received), dict(self._refused))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        self._lease.close()
        super().close(timeout)

    def _send_value(self, value: Value) -> bool:
        """Send one value; return False if it is not needed, refused, or makes no progress."""
        if not value.size:
            return False  # the run does not return what this rank returned
        self.send(ValueStart(value.rank, value.size))
        for data in value.parts():
            if value.rank in self._refused:
                return False
            if not self.wait_below(MAX_BACKLOG, STALL_SECONDS):
                return False
            self.send(ValuePart(value.rank, data))
        return True

    def _receive(self, message: Any) -> None:
        self._lease.renew()
        if not isinstance(message, (ValueReceived, ValueRefused)):
            self._pass_on(message)
            return
        with self._changed:
            if isinstance(message, ValueReceived):
                self._received.add(message.rank)
            else:
                self._refused[message.rank] = message.room
            self._changed.notify_all()

    def _handle_lost(self) -> None:
        self._lease.link_lost()
        self._note_lost()
