"""Hosts and ports as people write them, of IPv4 and IPv6, and the name of this host in messages."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


def bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def joined(host: str, port: int | str) -> str:
    return f"[{bare(host)}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Return a host's address family and address: an IPv4 address if it has one, else IPv6."""
    found = socket.getaddrinfo(bare(host), None, type=socket.SOCK_STREAM)
    family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(where[0])


def split_address(name: str, address: object) -> tuple[str, int]:
    """Split ``host``, ``host:port``, ``[IPv6]`` or ``[IPv6]:port``."""
    wanted = f"{name} must be 'host' or 'host:port', with an IPv6 address in brackets"
    if not isinstance(address, str):
        raise TypeError(f"{wanted}, but is {address!r}.")
    before, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        before, colon, port = address, "", ""
    host = bare(before)
    if (":" in host) != (host != before) or (host != before and not _is_ipv6(host)):
        raise ValueError(f"{wanted}, such as '[fd00::2]:5000', but is {address!r}.")
    if not host or (colon and not port.isdecimal()):
        raise ValueError(f"{wanted}, but is {address!r}.")
    if int(port or 0) > MAX_PORT:
        raise ValueError(f"{name} is {address!r}, but the highest port is {MAX_PORT}.")
    return host, int(port or 0)


def checked_port(name: str, port: object) -> int:
    """Return a port, or 0 for any free one."""
    if isinstance(port, bool) or not isinstance(port, int):
        raise TypeError(f"{name} is a port, or 0 for a free one, but is {port!r}.")
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"{name} is a port from 1 to {MAX_PORT}, or 0 for a free one: not {port}.")
    return port


def port_range(name: str, ports: object) -> range | None:
    """Read a range of ports such as "29500-29599", or a single one; None if there is none."""
    if ports is None:
        return None
    wanted = f"{name} is a range of ports such as '29500-29599'"
    if not isinstance(ports, str):
        raise TypeError(f"{wanted}, but is {ports!r}.")
    first, dash, last = (part.strip() for part in ports.partition("-"))
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(f"{wanted}, but is {ports!r}.")
    if not 0 < int(first) <= int(last) <= MAX_PORT:
        raise ValueError(
            f"{wanted}, from a lower to a higher port of 1 to {MAX_PORT}, but is {ports!r}."
        )
    return range(int(first), int(last) + 1)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


_host_name = ""


def host_name() -> str:
    """Return the name that the run uses for this host; outside a run, its own."""
    return _host_name or socket.gethostname()


def use_host_name(name: str) -> None:
    """Use this name, by which Spark or the driver knows the host, from now on."""
    global _host_name
    _host_name = name
