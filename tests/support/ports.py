"""Ports that tests choose themselves, and connections that they accept from ranks."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Sequence

from distributor import RunFuture

DEADLINE = 120.0
"""Seconds in which the ranks of all runs must have connected."""


def free_port() -> int:
    """Return a port on which no process listens, and which the system gives to none by itself."""
    while True:
        port = random.SystemRandom().randrange(15_100, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def accept(server: socket.socket, runs: Sequence[RunFuture]) -> list[socket.socket]:
    """Accept a connection from each run's one rank; raise the error of a run that has failed."""
    server.settimeout(0.5)
    connections: list[socket.socket] = []
    deadline = time.monotonic() + DEADLINE
    while len(connections) < len(runs):
        try:
            connections.append(server.accept()[0])
        except TimeoutError:
            for run in runs:
                if run.done():
                    run.result()
            assert time.monotonic() < deadline, f"{len(connections)} ranks have connected"
    return connections
