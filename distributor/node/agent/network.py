"""The addresses and network interfaces of a node, and the socket of rank 0's store."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from distributor.core.addresses import host_name, is_loopback, resolve
from distributor.errors import ExecutorNotReady

BACKLOG = 4096
"""Connections that can wait until rank 0 serves the store: one of each rank and each node."""
IPV6_INTERFACES = "/proc/net/if_inet6"


def routable_address(name: str, peers: Sequence[str]) -> str:
    """Return the address at which this machine, which has the host name `name`, is reachable.

    That is an IPv4 address if the name has one, and otherwise an IPv6 address. If the name resolves
    to loopback (Debian's 127.0.1.1), the peers can use that address only if all of them are on this
    machine. Otherwise the result is the local address from which packets to a peer are sent.
    """
    _, address = resolve(name)
    other_hosts = [peer for peer in peers if peer != name]
    if is_loopback(address) and other_hosts:
        return source_address(other_hosts[0])
    return address


def source_address(destination: str) -> str:
    """Return the local address that the kernel uses for `destination`; no packet is sent."""
    family, address = resolve(destination)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def listen_for_ranks(address: str, ports: range | None) -> socket.socket:
    """Return a bound socket on which rank 0 can serve the store."""
    family, _ = resolve(address)
    if ports is None:
        return socket.create_server((address, 0), family=family, backlog=BACKLOG)
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            refusal = error
    raise ExecutorNotReady(
        f"rank_ports is '{ports.start}-{ports.stop - 1}', and on {host_name()} none of these "
        f"ports can be bound at {address} for rank 0's store ({refusal.strerror}). Each run whose "
        "rank 0 is on that host uses one: set a wider range."
    )


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address; None if it is unknown.

    It is unknown on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    if ":" in address:
        return _ipv6_interfaces().get(ipaddress.IPv6Address(address.partition("%")[0]))
    return _ipv4_interfaces().get(address)


def _ipv4_interfaces() -> dict[str, str]:
    """Map each IPv4 address of this machine to its interface."""
    import array
    import fcntl

    siocgifconf, entry_size = 0x8912, 40
    table = array.array("B", bytes(entry_size * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(table), table.buffer_info()[0])
        filled = struct.unpack("iL", fcntl.ioctl(any_socket, siocgifconf, request))[0]
    entries = (bytes(table[i : i + entry_size]) for i in range(0, filled, entry_size))
    return {
        socket.inet_ntoa(entry[20:24]): entry[:16].split(b"\0")[0].decode().split(":")[0]
        for entry in entries
    }


def _ipv6_interfaces() -> dict[ipaddress.IPv6Address, str]:
    """Map each IPv6 address of this machine to its interface."""
    try:
        rows = [line.split() for line in Path(IPV6_INTERFACES).read_text().splitlines()]
    except OSError:
        return {}  # a kernel without IPv6
    return {ipaddress.IPv6Address(int(row[0], 16)): row[-1] for row in rows}
