"""The interface of links: a node's end, and the driver's end of the links of all nodes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distributor.core.threads import MessageQueue
from distributor.serialization.outcome import Value
from distributor.wire.messages import HERE, LOST, Output, WholeValue


@dataclass(frozen=True)
class Delivery:
    """Which values have reached the driver, and which it has refused.

    Parameters
    ----------
    received : frozenset of int
        The ranks whose values the driver has.
    refused : mapping of int to int
        The driver's free memory (bytes), by rank whose value is larger than that.
    """

    received: frozenset[int] = frozenset()
    refused: Mapping[int, int] = field(default_factory=dict)


class NodeLink(Protocol):
    """A node's end of its link. It passes the driver's messages to a function, on any thread."""

    @property
    def lost(self) -> bool:
        """Whether nothing can be sent any more, or nothing ever could."""

    def send(self, message: object) -> None:
        """Send a message, without waiting; it is dropped if the link is lost."""

    def has_room(self) -> bool:
        """Return whether output can be sent now; if not, it stays in the rank's file."""

    def deliver(self, values: Sequence[Value]) -> Delivery:
        """Send values, and wait for the driver's answers."""

    def close(self) -> None:
        """Send what is waiting, and end the link."""


class Links(Protocol):
    """The driver's end of the links of a run's nodes."""

    def get(self, timeout: float) -> tuple[int, object] | None:
        """Wait for the next message: ``(node, message)``; None after a timeout.

        ``(node, LOST)`` follows the last message of a node, and ``(HERE, message)`` is one of
        `post`.
        """

    def post(self, message: object) -> None:
        """Put a message of this process into the queue. From any thread."""

    def send(self, node: int, message: object) -> None:
        """Send to one node, without waiting; dropped if it is not connected."""

    def broadcast(self, message: object) -> None:
        """Send to every node that is connected, without waiting."""


class NoLink:
    """The link of a node that cannot reach the driver."""

    lost = True

    def send(self, message: object) -> None:
        pass

    def has_room(self) -> bool:
        return True

    def deliver(self, values: Sequence[Value]) -> Delivery:
        return Delivery()

    def close(self) -> None:
        pass


MAX_BACKLOG = 8 * 2**20
"""Bytes of output that may wait for the driver; a node that sends more waits, too."""


class QueueLinks:
    """The driver's end of links in this process: one queue, from which the driver takes."""

    def __init__(self) -> None:
        self._queue: MessageQueue[tuple[int, object]] = MessageQueue()
        self._nodes: dict[int, Callable[[object], object]] = {}
        self._backlog = 0
        self._is_limited = True
        self._changed = threading.Condition()

    def connect(self, node: int, on_message: Callable[[object], object]) -> QueueLink:
        """Connect a node, whose function is then called with each message to it."""
        self._nodes[node] = on_message
        return QueueLink(self, node)

    def get(self, timeout: float) -> tuple[int, object] | None:
        try:
            node, message = self._queue.get(timeout)
        except queue.Empty:
            return None
        if isinstance(message, Output):
            with self._changed:
                self._backlog -= len(message.data)
                self._changed.notify_all()
        return node, message

    def post(self, message: object) -> None:
        self._queue.put((HERE, message))

    def send(self, node: int, message: object) -> None:
        if receive := self._nodes.get(node):
            receive(message)

    def broadcast(self, message: object) -> None:
        for receive in list(self._nodes.values()):
            receive(message)

    def lift_limit(self) -> None:
        """Let nodes send any amount of output, because nothing is received for a while."""
        with self._changed:
            self._is_limited = False
            self._changed.notify_all()

    def receive(self, node: int, message: object) -> None:
        if isinstance(message, Output):
            with self._changed:
                self._changed.wait_for(lambda: self._backlog < MAX_BACKLOG or not self._is_limited)
                self._backlog += len(message.data)
        self._queue.put((node, message))

    def disconnect(self, node: int) -> None:
        if self._nodes.pop(node, None):
            self._queue.put((node, LOST))


class QueueLink:
    """A node's link to a driver in the same process."""

    lost = False

    def __init__(self, links: QueueLinks, node: int) -> None:
        self._links = links
        self._node = node

    def send(self, message: object) -> None:
        self._links.receive(self._node, message)

    def has_room(self) -> bool:
        return True

    def deliver(self, values: Sequence[Value]) -> Delivery:
        for value in values:
            self.send(WholeValue(value))
        return Delivery(frozenset(value.rank for value in values))

    def close(self) -> None:
        self._links.disconnect(self._node)
