"""Links between nodes and a driver in the same process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from distributor.link.node_link import Delivery
from distributor.serialization.outcome import Value
from distributor.wire.hub import HERE, LOST
from distributor.wire.messages import Output, WholeValue

MAX_BACKLOG = 8 * 2**20
"""Bytes of output that may wait for the driver; a node that sends more waits, too."""


class QueueLinks:
    """The driver's end of links in this process: one queue, from which the driver takes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
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
            node, message = self._queue.get(timeout=max(timeout, 0.0))
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
