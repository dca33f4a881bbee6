"""A node's link to the driver's hub over TCP, with the lease that ends with the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from distributor.link.driver_lease import DriverLease
from distributor.link.node_link import Delivery
from distributor.serialization.outcome import Value
from distributor.wire.link import Link
from distributor.wire.messages import ValuePart, ValueReceived, ValueRefused, ValueStart

CONNECT_SECONDS = 5.0
"""Seconds to connect to the hub, after which a node goes on without a link."""
HANDSHAKE_SECONDS = 20.0
"""Seconds for the hub's answer, which a driver whose interpreter is busy gives late."""
STALL_SECONDS = 60.0
"""Seconds without progress after which a value goes another way."""
MAX_BACKLOG = 8 * 2**20
"""Bytes that may wait in the link before a writer pauses."""


class TcpLink:
    """A node's link to the hub.

    Parameters
    ----------
    hub : tuple of str and int
        The hub's address and port.
    secret : bytes
        The run's secret.
    node : int
        The node's number.
    on_message : callable
        Called with each message of the driver, on the link's thread.
    on_lost : callable
        Called once if the link is lost.
    on_driver_lost : callable
        Called once, with the reason, if the driver is gone or could not be reached for too long.

    Raises
    ------
    OSError
        If the hub cannot be reached, or does not prove that it holds the run's secret.
    """

    def __init__(
        self,
        hub: tuple[str, int],
        secret: bytes,
        node: int,
        on_message: Callable[[object], object],
        on_lost: Callable[[], object],
        on_driver_lost: Callable[[str], object],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._received: set[int] = set()
        self._refused: dict[int, int] = {}
        self._changed = threading.Condition()
        self._lease = DriverLease(hub, secret, on_driver_lost)
        self._link = Link.connect(
            *hub,
            secret,
            node,
            timeout=CONNECT_SECONDS,
            handshake_timeout=HANDSHAKE_SECONDS,
            on_message=self._receive,
            on_lost=self._handle_lost,
        )
        self._lease.start()

    @property
    def lost(self) -> bool:
        return self._link.lost

    def send(self, message: object) -> None:
        self._link.send(message)

    def has_room(self) -> bool:
        return self._link.backlog() < MAX_BACKLOG

    def deliver(self, values: Sequence[Value]) -> Delivery:
        sent = {value.rank for value in values if self._send_value(value)}
        with self._changed:
            self._changed.wait_for(
                lambda: self.lost or sent <= self._received | self._refused.keys(), STALL_SECONDS
            )
            return Delivery(frozenset(sent & self._received), dict(self._refused))

    def close(self) -> None:
        self._lease.close()
        self._link.close()

    def _send_value(self, value: Value) -> bool:
        """Send one value; return False if it is not needed, refused, or makes no progress."""
        if not value.size:
            return False  # the run does not return what this rank returned
        self._link.send(ValueStart(value.rank, value.size))
        for data in value.parts():
            if value.rank in self._refused:
                return False
            if not self._link.wait_below(MAX_BACKLOG, STALL_SECONDS):
                return False
            self._link.send(ValuePart(value.rank, data))
        return True

    def _receive(self, message: Any) -> None:
        self._lease.renew()
        if isinstance(message, ValueReceived):
            self._note(lambda: self._received.add(message.rank))
        elif isinstance(message, ValueRefused):
            self._note(lambda: self._refused.update({message.rank: message.room}))
        else:
            self._on_message(message)

    def _handle_lost(self) -> None:
        self._lease.link_lost()
        self._note(lambda: None)
        self._on_lost()

    def _note(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
