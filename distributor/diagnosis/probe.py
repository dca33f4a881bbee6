"""Measures the network path from one host to another: round trip, clock and bandwidth."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace

from distributor.core.addresses import joined, resolve
from distributor.node.agent.network import interface_of, mtu_of

CONNECT_SECONDS = 3.0
TRANSFER_SECONDS = 3.0
"""Seconds for a transfer; on a path that drops large packets it never ends."""
SERVE_SECONDS = 30.0
"""Seconds for which a server waits for what a client sends next."""
PINGS = 5
TOKEN_SIZE = 16
PING, TRANSFER = b"P", b"T"
_TIME, _SIZE = struct.Struct(">d"), struct.Struct(">Q")
_CHUNK = 256 * 1024


@dataclass(frozen=True)
class NetworkPath:
    """What was measured from one host to another.

    Parameters
    ----------
    source, target : str
        The hosts.
    address : str
        The host and port that were connected to.
    error : str
        Why there is no connection, or a transfer failed; empty if both worked.
    connected : bool
        Whether a connection was made.
    round_trip : float
        The fastest round trip (seconds).
    clock_offset : float
        By how much the target's clock is ahead of the source's (seconds).
    bandwidth : float or None
        Bytes per second of a short transfer; None if it was not measured.
    interface : str or None
        The interface of the source.
    mtu : int or None
        The largest packet of that interface (bytes).
    """

    source: str
    target: str
    address: str
    error: str = ""
    connected: bool = False
    round_trip: float = 0.0
    clock_offset: float = 0.0
    bandwidth: float | None = None
    interface: str | None = None
    mtu: int | None = None


class ProbeServer:
    """Answers the probes of those who hold a token; a context manager.

    Parameters
    ----------
    address : str
        An address of this machine.
    token : bytes
        What a client must send first, of `TOKEN_SIZE` bytes.
    ports : range, optional
        The ports to try; by default the kernel chooses.

    Raises
    ------
    OSError
        If no port can be bound.
    """

    def __init__(self, address: str, token: bytes, ports: range | None = None) -> None:
        self._token = token
        self._socket = _listen(address, ports or range(1))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="distributor-probe", daemon=True)
        self._clients: set[socket.socket] = set()
        self._closed = False

    def __enter__(self) -> ProbeServer:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed = True
        # Closing alone would not wake the thread that waits for a connection.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(CONNECT_SECONDS)
        for client in list(self._clients):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(SERVE_SECONDS)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hmac.compare_digest(_receive(client, TOKEN_SIZE), self._token):
                while command := client.recv(1):
                    if command == TRANSFER:
                        (size,) = _SIZE.unpack(_receive(client, _SIZE.size))
                        _discard(client, size)
                    client.sendall(_TIME.pack(time.time()))
        self._clients.discard(client)


class Probe:
    """A connection to a `ProbeServer`; a context manager.

    It never raises: what fails is the error of the `path`.

    Parameters
    ----------
    source, target : str
        The names of this host and of the server's.
    address : tuple of str and int
        Where the server listens.
    token : bytes
        The server's token.
    """

    def __init__(self, source: str, target: str, address: tuple[str, int], token: bytes) -> None:
        self.path = NetworkPath(source, target, joined(*address))
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.create_connection(address, CONNECT_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(token)
            self._ping(self._socket)
        except OSError as error:
            self.path = replace(self.path, error=str(error))

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def transfer(self, size: int) -> None:
        """Measure the time of a transfer of so many bytes."""
        if self._socket is None or self.path.error:
            return
        sock, deadline = self._socket, time.monotonic() + TRANSFER_SECONDS
        begun = time.monotonic()
        try:
            sock.settimeout(TRANSFER_SECONDS)
            sock.sendall(TRANSFER + _SIZE.pack(size) + bytes(size))
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            _receive(sock, _TIME.size)
        except OSError as error:
            self.path = replace(self.path, error=f"a transfer of {size} bytes failed: {error}")
            return
        # What takes a round trip is not the bandwidth's.
        seconds = max(1e-6, time.monotonic() - begun - self.path.round_trip)
        self.path = replace(self.path, bandwidth=size / seconds)

    def _ping(self, sock: socket.socket) -> None:
        local = sock.getsockname()[0]
        interface = interface_of(local)
        trips = [_ping(sock) for _ in range(PINGS)]
        round_trip, clock_offset = min(trips)
        self.path = replace(
            self.path,
            connected=True,
            round_trip=round_trip,
            clock_offset=clock_offset,
            interface=interface,
            mtu=mtu_of(interface) if interface else None,
        )


def _ping(sock: socket.socket) -> tuple[float, float]:
    """Return the seconds of a round trip, and by how much the other clock is ahead."""
    begun, clock = time.monotonic(), time.time()
    sock.sendall(PING)
    (theirs,) = _TIME.unpack(_receive(sock, _TIME.size))
    round_trip = time.monotonic() - begun
    return round_trip, theirs - clock - round_trip / 2


def _listen(address: str, ports: range) -> socket.socket:
    family, _ = resolve(address)
    for port in ports[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family)
    return socket.create_server((address, ports[-1]), family=family)


def _receive(sock: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = sock.recv(size - len(received))
        if not part:
            raise ConnectionError("the connection was closed")
        received += part
    return received


def _discard(sock: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    while size > 0:
        count = sock.recv_into(buffer[: min(size, _CHUNK)])
        if not count:
            raise ConnectionError("the connection was closed")
        size -= count
