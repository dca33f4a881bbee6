"""A node's lease: the node stops its ranks once the driver is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from distributor.wire import protocol
from distributor.wire.connection import is_served

CHECK_SECONDS = 5.0
"""Seconds between two connections that check a driver, and for each of them to be accepted.

The driver is checked once it has been silent for twice as long.
"""
SILENCE_SECONDS = 300.0
"""Seconds for which what listens at the hub's address may say nothing once the link is lost."""


class DriverLease:
    """Expires when the driver cannot be reached for a while, or is known to be gone.

    Neither a lost link nor silence makes it expire. As long as what listens at the hub's address
    proves that it serves the run, the driver lives, and the run goes on (through Spark if the link
    is lost). A driver that is stopped, too busy or out of descriptors cannot prove anything. The
    kernel keeps its connections: as long as the link exists, it lives. Once the link is lost,
    another program may listen there, so that the lease then ends after a while.

    Parameters
    ----------
    hub : tuple of str and int
        The address and port of the driver's hub.
    secret : bytes
        The run's secret.
    on_expired : callable
        Called once, on the lease's own thread, with the reason.
    """

    def __init__(
        self, hub: tuple[str, int], secret: bytes, on_expired: Callable[[str], object]
    ) -> None:
        self._hub = hub
        self._secret = secret
        self._on_expired = on_expired
        self._renewed_at = self._proved_at = time.monotonic()
        self._link_lost = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="distributor-lease", daemon=True)

    def start(self) -> None:
        """Start to watch the driver."""
        self.renew()
        self._thread.start()

    def renew(self) -> None:
        """Note that the driver has just sent a message."""
        self._renewed_at = self._proved_at = time.monotonic()

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
        """Return whether the driver certainly does not listen; renew the lease if it may."""
        try:
            proved = is_served(*self._hub, self._secret, timeout=CHECK_SECONDS)
        except (ConnectionRefusedError, protocol.RunNotServed):
            return True
        except OSError:
            return False  # the network is partitioned, or the driver overloaded; it may recover
        if proved:
            self.renew()
        elif not self._link_lost or time.monotonic() < self._proved_at + SILENCE_SECONDS:
            self._renewed_at = time.monotonic()
        return False
