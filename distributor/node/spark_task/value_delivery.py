"""Sends the values of a node's ranks to the driver over the link."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from distributor.node.spark_task.channel import Delivery
from distributor.serialization.outcome import Value
from distributor.wire.link import Link
from distributor.wire.messages import ValuePart, ValueReceived, ValueRefused, ValueStart

STALL_SECONDS = 60.0
"""Seconds without progress after which a value goes through Spark instead of the link."""
MAX_BACKLOG = 8 * 1024 * 1024
"""Bytes that may wait in the link before a writer pauses."""


class ValueDelivery:
    """The values of a node on their way over the link, and the driver's answers."""

    def __init__(self) -> None:
        self._received: set[int] = set()
        self._refused: dict[int, int] = {}
        self._changed = threading.Condition()

    def note_received(self, message: ValueReceived) -> None:
        """Note that the driver has a rank's whole value. From any thread."""
        with self._changed:
            self._received.add(message.rank)
            self._changed.notify_all()

    def note_refused(self, message: ValueRefused) -> None:
        """Note that the driver has no memory for a rank's value. From any thread."""
        with self._changed:
            self._refused[message.rank] = message.room
            self._changed.notify_all()

    def note_link_lost(self) -> None:
        """Stop waiting for answers, because none can come any more. From any thread."""
        with self._changed:
            self._changed.notify_all()

    def deliver(self, values: Sequence[Value], link: Link) -> Delivery:
        """Send values and wait for the answers, for as long as the link is not lost."""
        sent = {value.rank for value in values if self._send(value, link)}
        with self._changed:
            self._changed.wait_for(
                lambda: link.lost or sent <= self._received | self._refused.keys(), STALL_SECONDS
            )
            return Delivery(frozenset(sent & self._received), dict(self._refused))

    def _send(self, value: Value, link: Link) -> bool:
        """Send one value; return False if it is not needed, refused, or makes no progress."""
        if not value.size:
            return False  # the run does not return what this rank returned
        link.send(ValueStart(value.rank, value.size))
        for data in value.parts():
            if value.rank in self._refused or not link.wait_below(MAX_BACKLOG, STALL_SECONDS):
                return False
            link.send(ValuePart(value.rank, data))
        return True
