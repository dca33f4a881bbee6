"""A node's lease: it stops its ranks once the driver has gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from distributor.wire import protocol


class DriverLease:
    """Expires when the driver cannot be reached for a while, or is known to have gone.

    Neither a lost link nor silence ends it: as long as somebody listens at the hub's address the
    driver lives, and the run goes on, through Spark where the link is lost.

    Parameters
    ----------
    hub : tuple of str and int
        Where the driver's hub listens.
    on_expired : callable
        Called once, on the lease's own thread, with the reason.
    """

    def __init__(self, hub: tuple[str, int], on_expired: Callable[[str], object]) -> None:
        self._hub = hub
        self._on_expired = on_expired
        self._renewed = time.monotonic()
        self._link_lost = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="distributor-lease", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._renewed = time.monotonic()
        self._thread.start()

    def renew(self) -> None:
        """Note that the driver was heard."""
        self._renewed = time.monotonic()

    def link_lost(self) -> None:
        """Look for the driver from now on, who will not be heard any more."""
        with self._changed:
            self._link_lost = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let it never expire."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch(self) -> None:
        while not self._closed:
            silent = time.monotonic() > self._renewed + 2 * protocol.HEARTBEAT_SECONDS
            if (self._link_lost or silent) and self._has_gone():
                self._expire("The driver has gone")
            elif time.monotonic() > self._renewed + protocol.LEASE_SECONDS:
                self._expire(f"The driver could not be reached for {protocol.LEASE_SECONDS:g} s")
            self._wait(self._link_lost)

    def _wait(self, lost_before: bool) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._link_lost != lost_before, protocol.HEARTBEAT_SECONDS
            )

    def _expire(self, reason: str) -> None:
        with self._changed:
            expired, self._closed = not self._closed, True
        if expired:
            self._on_expired(reason)

    def _has_gone(self) -> bool:
        """Tell whether nobody listens there any more; where somebody does, renew."""
        try:
            # Its kernel takes the connection even where the driver itself is too busy to greet.
            socket.create_connection(self._hub, protocol.HEARTBEAT_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # cut off; it may come back
        self.renew()
        return False
