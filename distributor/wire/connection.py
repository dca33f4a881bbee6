"""Connects a socket to a listener of this package, with authentication in both directions."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from distributor.wire import protocol


def connect(
    host: str,
    port: int,
    secret: bytes,
    node: int,
    *,
    timeout: float,
    handshake_timeout: float | None = None,
) -> tuple[socket.socket, protocol.Session]:
    """Connect as ``node`` to the run with this secret; return a blocking socket and its session."""
    limit = timeout
    try:
        sock = _dial(host, port, time.monotonic() + timeout)
        try:
            # The kernel accepts connections for a listener that is too busy to answer at once.
            limit = timeout if handshake_timeout is None else handshake_timeout
            session = _prove(sock, secret, node, time.monotonic() + limit)
        except BaseException:
            sock.close()
            raise
    except TimeoutError as error:
        raise TimeoutError(f"no hub answers at {host}:{port} within {limit:g} s") from error
    sock.settimeout(None)
    return sock, session


def is_served(host: str, port: int, secret: bytes, *, timeout: float) -> bool:
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
