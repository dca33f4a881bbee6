"""Hubs, links, and raw connections to a hub, for the tests of the wire protocol."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from distributor.wire import protocol
from distributor.wire.messages import Heartbeat
from distributor.wire.tcp_link import Link

SECRET = b"a secret of the run"
SOON = 10.0
"""A deadline, in seconds, for what takes milliseconds."""
MIB = 2**20
FLOOD = 128
"""MiB that exceed what a hub and the kernel buffer together before the hub stops reading."""
RESET: Final = struct.pack("ii", 1, 0)
"""A value of SO_LINGER with which ``close()`` resets the connection."""


class Call:
    """An object that unpickles as the return value of a call."""

    def __init__(self, function: Callable[..., object], argument: object) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        return self.call


def link(
    port: int,
    node: int = 0,
    on_message: Callable[[object], None] = print,
    on_lost: Callable[[], None] = lambda: None,
    secret: bytes = SECRET,
) -> Link:
    """Connect a link to the hub at a port of this machine."""
    return Link(
        "127.0.0.1", port, secret, node, timeout=SOON, on_message=on_message, on_lost=on_lost
    )


def without_heartbeats(on_message: Callable[[object], None]) -> Callable[[object], None]:
    """Return a function for messages that ignores heartbeats, which may come at any time."""
    return lambda message: None if isinstance(message, Heartbeat) else on_message(message)


def stranger(port: int) -> socket.socket:
    """Connect to a hub without a handshake."""
    return socket.create_connection(("127.0.0.1", port), SOON)


def greeted(port: int) -> tuple[socket.socket, bytes]:
    """Connect to a hub, and return the connection and the hub's greeting."""
    sock = stranger(port)
    return sock, sock.recv(protocol.GREETING.size, socket.MSG_WAITALL)


def frames(greeting: bytes, messages: Iterable[object], nonce: bytes = bytes(32)) -> list[bytes]:
    """Return the messages as the frames that a link sends, from its first on."""
    _, hub_nonce = protocol.GREETING.unpack(greeting)
    hello = protocol.hello(SECRET, greeting, nonce, 0)
    tags = protocol.admit(SECRET, hub_nonce, hello)[2].received
    encoded = map(protocol.encode, messages)
    return [b"".join((*frame, tags.next(*frame))) for frame in encoded]


def read_until_closed(sock: socket.socket) -> bytes:
    """Return what the hub sends until it closes the connection, which it must do soon."""
    received, deadline = bytearray(), time.monotonic() + SOON
    with sock, contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            received += data
            assert time.monotonic() < deadline
    return bytes(received)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds
