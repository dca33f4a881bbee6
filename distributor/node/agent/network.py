"""A node's addresses and interfaces, and the socket of rank 0's store."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from distributor.core.addresses import is_loopback, resolve
from distributor.core.host import host_name
from distributor.errors import ExecutorNotReady

BACKLOG = 4096
"""Connections that may wait until rank 0 serves the store: one from each rank, and each node."""
IPV6_INTERFACES = "/proc/net/if_inet6"


def routable_address(name: str, peers: Sequence[str]) -> str:
    """Find the address under which this machine, called `name`, is reached by its peers.

    It is an IPv4 address if the name has one, or else IPv6. A host name that resolves to loopback
    (Debian's 127.0.1.1) is right only if all peers are this machine; otherwise it is the address
    from which a packet to a peer leaves.
    """
    _, address = resolve(name)
    strangers = [peer for peer in peers if peer != name]
    if is_loopback(address) and strangers:
        return source_address(strangers[0])
    return address


def source_address(destination: str) -> str:
    """Find the local address from which `destination` is reached; no packet is sent."""
    family, address = resolve(destination)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def listen_for_ranks(address: str, ports: range | None) -> socket.socket:
    """Bind the socket on which rank 0 serves the store.

    Parameters
    ----------
    address : str
        Of this machine.
    ports : range, optional
        The ports it may have; the first that is free is taken. By default any.

    Raises
    ------
    ExecutorNotReady
        If none of the ports is free.
    """
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
        f"rank_ports is '{ports.start}-{ports.stop - 1}', and on {host_name()} none of "
        f"these can be had at {address} for rank 0's store ({refusal.strerror}). Each run whose "
        "rank 0 is on that host takes one: give a wider range."
    )


def interface_of(address: str) -> str | None:
    """Name the network interface that has an address; None if that cannot be told (no Linux)."""
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
