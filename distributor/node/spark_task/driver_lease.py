"""A node's lease: the node stops its ranks once the driver is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from distributor.wire import protocol

CHECK_SECONDS = 5.0
"""Seconds between two connections that check a driver, and for each of them to be accepted.

The driver is checked once it has been silent for twice as long.
"""


class DriverLease:
    """Expires when the driver cannot be reached for a while, or is known to be gone.

    Neither a lost link nor silence makes it expire. As long as a process listens at the hub's
    address, the driver lives, and the run goes on (through Spark if the link is lost).

    Parameters
    ----------
    hub : tuple of str and int
        The address and port of the driver's hub.
    on_expired : callable
        Called once, on the lease's own thread, with the reason.
    """

    def __init__(self, hub: tuple[str, int], on_expired: Callable[[str], object]) -> None:
        self._hub = hub
        self._on_expired = on_expired
        self._renewed_at = time.monotonic()
        self._link_lost = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="distributor-lease", daemon=True)

    def start(self) -> None:
        """Start to watch the driver."""
        self._renewed_at = time.monotonic()
        self._thread.start()

    def renew(self) -> None:
        """Note that the driver has just sent a message."""
        self._renewed_at = time.monotonic()

    def link_lost(self) -> None:
        """Note that the link is lost: from now on, connect to the hub's address to check it."""
        with self._changed:
            self._link_lost = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop to watch: the lease never expires after this."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch(self) -> None:
        while not self._closed:
            silent = time.monotonic() > self._renewed_at + 2 * CHECK_SECONDS
            if (self._link_lost or silent) and self._is_driver_gone():
                self._expire("The driver is gone")
            elif time.monotonic() > self._renewed_at + protocol.DRIVER_LEASE_SECONDS:
                seconds = protocol.DRIVER_LEASE_SECONDS
                self._expire(f"The driver could not be reached for {seconds:g} s")
            self._wait(self._link_lost)

    def _wait(self, lost_before: bool) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._link_lost != lost_before, CHECK_SECONDS
            )

    def _expire(self, reason: str) -> None:
        with self._changed:
            expired, self._closed = not self._closed, True
        if expired:
            self._on_expired(reason)

    def _is_driver_gone(self) -> bool:
        """Return whether nothing listens at the hub's address; otherwise renew the lease."""
        try:
            # The driver's kernel accepts the connection even if the driver is too busy to answer.
            socket.create_connection(self._hub, CHECK_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # the network is partitioned; it may recover
        self.renew()
        return False
