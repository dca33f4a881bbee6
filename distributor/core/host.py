"""The name of this host in messages."""

from __future__ import annotations

import socket

_given: list[str] = []


def host_name() -> str:
    """Return the name that the run uses for this host; outside a run, its own."""
    return _given[-1] if _given else socket.gethostname()


def use_host_name(name: str) -> None:
    """Use this name, by which Spark or the driver knows the host, from now on."""
    _given[:] = [name]
