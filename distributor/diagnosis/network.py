"""The network paths between hosts: how they are measured, and what is wrong with them."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from distributor.core.addresses import joined, resolve
from distributor.core.resources import format_bytes
from distributor.core.spelling import Message
from distributor.core.text import counted
from distributor.diagnosis.exchange import Exchange
from distributor.diagnosis.report import Check, failure, hosts_text, not_checked, ok, warning
from distributor.node.agent.network import interface_of, mtu_of

DRIVER = "the driver"
"""How paths name the driver's machine."""
CONNECT_SECONDS = 3.0
TRANSFER_SECONDS = 3.0
"""Seconds for a transfer; on a path that drops large packets it never ends."""
SERVE_SECONDS = 30.0
"""Seconds for which a server waits for what a client sends next."""
PINGS = 5
TOKEN_SIZE = 16
PING, TRANSFER, ATTEND = b"P", b"T", b"A"
_TIME, _SIZE = struct.Struct(">d"), struct.Struct(">Q")
_ATTENDANCE = struct.Struct(">IIdQ")
"""The number of a round, the index of a task, seconds to wait, and the size of its text."""
ANSWER_SECONDS = 3.0
"""Seconds for the texts of a round to arrive, once it has ended."""
_CHUNK = 256 * 1024
MAX_PATHS = 3
"""Network paths that a row names; the others are counted."""
SLOW_ROUND_TRIP = 0.01
"""Seconds of a round trip above which a path is slow."""
SLOW_BANDWIDTH = 12.5e6
"""Bytes per second below which a path is slow: 100 Mbit/s."""
CLOCK_SECONDS = 1.0
"""Seconds by which clocks may differ."""
HUB_FIX = Message(
    "Allow connections from the executors to the driver's port, and set {hub_port} "
    "(spark.distributor.hub.port) to a port that is open, or {hub_address} to an address of the "
    "driver that the executors reach."
)
RANKS_FIX = Message(
    "Allow TCP connections between the hosts of the executors, in both directions: {rank_ports} "
    "(spark.distributor.rank.ports) limits the port of rank 0's store, and "
    "net.ipv4.ip_local_port_range of the hosts limits the ports of gloo and NCCL."
)


@dataclass(frozen=True)
class NetworkPath:
    """What was measured from one host to another."""

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
        The address of this machine at which it listens.
    token : bytes
        What a client sends first.
    ports : range, optional
        The ports of which it takes a free one; by default any.
    exchange : Exchange, optional
        Where its clients exchange texts.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        ports: range | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._token = token
        self._exchange = exchange
        self._socket = _listen(address, ports or range(1))
        self.address: tuple[str, int] = (address, self._socket.getsockname()[1])
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
                    if command == ATTEND:
                        self._attend(client)
                        continue
                    if command == TRANSFER:
                        (size,) = _SIZE.unpack(_receive(client, _SIZE.size))
                        _discard(client, size)
                    client.sendall(_TIME.pack(time.time()))
        self._clients.discard(client)

    def _attend(self, client: socket.socket) -> None:
        number, task, seconds, size = _ATTENDANCE.unpack(_receive(client, _ATTENDANCE.size))
        text = _receive(client, size).decode()
        if self._exchange is None:
            raise ConnectionError("nothing is exchanged here")
        answer = json.dumps(self._exchange.attend(number, task, text, seconds)).encode()
        client.sendall(_SIZE.pack(len(answer)) + answer)


def attend(
    address: tuple[str, int], token: bytes, number: int, task: int, text: str, seconds: float
) -> dict[int, str]:
    """Attend a round of the `Exchange` of a `ProbeServer`; raise OSError if it does not answer."""
    content = text.encode()
    with socket.create_connection(address, CONNECT_SECONDS) as sock:
        header = _ATTENDANCE.pack(number, task, seconds, len(content))
        sock.sendall(token + ATTEND + header + content)
        sock.settimeout(seconds + ANSWER_SECONDS)
        (size,) = _SIZE.unpack(_receive(sock, _SIZE.size))
        return {int(key): found for key, found in json.loads(_receive(sock, size)).items()}


class Probe:
    """A connection to a `ProbeServer`; a context manager.

    It never raises: what fails is the error of the `path`.
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


def network_checks(
    paths: Sequence[NetworkPath], unreachable: Mapping[str, str], executors: int
) -> list[Check]:
    """Return the checks of the paths of executors; some may be unreachable, with the reason."""
    to_driver = [path for path in paths if path.target == DRIVER]
    between = [path for path in paths if path.target != DRIVER]
    checks = [
        failure(
            "network between executors",
            f"The executor cannot listen for other ranks: {why}.",
            Message(
                "Have the host's name resolve to an address of this host (/etc/hosts, DNS, or "
                "SPARK_LOCAL_IP), and check {rank_ports}."
            ),
            host,
        )
        for host, why in unreachable.items()
    ]
    checks += _reachable("network to the driver", to_driver, HUB_FIX)
    if executors < 2:
        checks.append(not_checked("network between executors", "there is only one executor"))
    elif not between and not unreachable:
        why = "the executors do not know each other's addresses"
        checks.append(not_checked("network between executors", why))
    checks += _reachable("network between executors", between, RANKS_FIX)
    checks += _speed(paths)
    checks += _interfaces(paths)
    checks += _clocks(to_driver)
    return checks


def _reachable(name: str, paths: Sequence[NetworkPath], fix: str) -> Iterator[Check]:
    blocked = [path for path in paths if path.error and not path.connected]
    broken = [path for path in paths if path.error and path.connected]
    if blocked:
        texts = _listed(blocked, lambda path: f"{_name(path)} at {path.address}: {path.error}")
        yield failure(name, f"No connection from {texts}.", fix, _sources(blocked))
    if broken:
        texts = _listed(broken, lambda path: f"{_name(path)}: {path.error}")
        mtu_fix = (
            "Small packets pass and large ones do not: set the same MTU on all interfaces and "
            "switches of the path, and do not block ICMP (fragmentation needed)."
        )
        yield failure(name, f"From {texts}.", mtu_fix, _sources(broken))
    working = [path for path in paths if not path.error]
    if working and not blocked and not broken:
        trip = max(path.round_trip for path in working)
        speeds = [path.bandwidth for path in working if path.bandwidth is not None]
        speed = f", {format_bytes(median(speeds))}/s" if speeds else ""
        found = f"{counted(len(working), 'path')}, {trip * 1000:.2g} ms{speed}"
        yield ok(name, found, _sources(working))


def _speed(paths: Sequence[NetworkPath]) -> Iterator[Check]:
    def is_slow(path: NetworkPath) -> bool:
        low = path.bandwidth is not None and path.bandwidth < SLOW_BANDWIDTH
        return not path.error and (low or path.round_trip > SLOW_ROUND_TRIP)

    def describe(path: NetworkPath) -> str:
        speed = "" if path.bandwidth is None else f" and {format_bytes(path.bandwidth)}/s"
        return f"{_name(path)}: {path.round_trip * 1000:.3g} ms{speed}"

    if slow := [path for path in paths if is_slow(path)]:
        yield warning(
            "network speed",
            f"Slow from {_listed(slow, describe)}.",
            "Check the link and its load, and the interface that is used (GLOO_SOCKET_IFNAME, "
            "NCCL_SOCKET_IFNAME). Gradients are exchanged in every step.",
            _sources(slow),
        )


def _interfaces(paths: Sequence[NetworkPath]) -> Iterator[Check]:
    hosts: dict[int, set[str]] = {}
    for path in paths:
        if path.mtu is not None and path.interface != "lo":
            hosts.setdefault(path.mtu, set()).add(f"{path.source} ({path.interface})")
    if len(hosts) > 1:
        found = "; ".join(f"{mtu} on {hosts_text(hosts[mtu])}" for mtu in sorted(hosts))
        yield warning(
            "MTU",
            f"The executors' interfaces differ: {found}.",
            "Set the same MTU on all of them and on the switches between them; larger packets "
            "may otherwise be dropped.",
            _sources(paths),
        )
    elif hosts:
        [(mtu, names)] = hosts.items()
        yield ok("MTU", f"{mtu} on {hosts_text(names)}", _sources(paths))


def _clocks(to_driver: Sequence[NetworkPath]) -> Iterator[Check]:
    measured = [path for path in to_driver if path.connected]
    # Half of a round trip is the error of the measurement.
    wrong = [p for p in measured if abs(p.clock_offset) > CLOCK_SECONDS + p.round_trip / 2]
    if wrong:
        texts = _listed(wrong, lambda path: f"{path.source}'s by {-path.clock_offset:+.1f} s")
        yield warning(
            "clock",
            f"Clocks differ from the driver's: {texts}.",
            "Synchronize the clocks (chrony, systemd-timesyncd): times in logs and metrics, the "
            "order of checkpoints, and TLS and Kerberos depend on them.",
            _sources(wrong),
        )
    elif measured:
        most = max(abs(path.clock_offset) for path in measured)
        yield ok("clock", f"within {max(most, 0.001):.3f} s of the driver's", _sources(measured))
    else:
        yield not_checked("clock", "no executor reaches the driver")


def _name(path: NetworkPath) -> str:
    return f"{path.source} to {path.target}"


def _listed(paths: Sequence[NetworkPath], describe: Callable[[NetworkPath], str]) -> str:
    shown = "; ".join(map(describe, paths[:MAX_PATHS]))
    more = len(paths) - MAX_PATHS
    return f"{shown}; and {more} more" if more > 0 else shown


def _sources(paths: Sequence[NetworkPath]) -> str:
    return hosts_text(path.source for path in paths)
