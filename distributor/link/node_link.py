"""The interface of links: a node's end, and the driver's end of the links of all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distributor.serialization.outcome import Value


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
