"""Ports that tests choose themselves."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port on which no process listens, and which the system gives to none by itself."""
    while True:
        port = random.SystemRandom().randrange(15_100, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
