"""The messages that nodes and the driver exchange over the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from distributor.serialization.outcome import Failure

Stream = Literal["stdout", "stderr"]
Source = Stream | Literal["progress", "usage"]
"""What ranks print, how far they say they are, and what their node does, told by its first."""


@dataclass(frozen=True)
class Preparing:
    """Node to driver: this node is here, and sees to what its ranks run with."""

    host: str


class NodeWarning(NamedTuple):
    """A problem of a node that the user should know about and that does not stop the run.

    Parameters
    ----------
    text : str
        The same text on all nodes that have the same problem.
    detail : str
        What differs between these nodes, such as figures.
    """

    text: str
    detail: str = ""


@dataclass(frozen=True)
class NodeUp:
    """Node to driver: this node's agent runs, on this host, with these versions."""

    host: str
    software: Mapping[str, str]
    warnings: tuple[NodeWarning, ...] = ()


@dataclass(frozen=True)
class Rendezvous:
    """Where rank 0's store listens: from node 0 to the driver, and from there to every node."""

    host: str
    port: int


@dataclass(frozen=True)
class RendezvousThroughSpark:
    """Driver to nodes: a node cannot reach the hub, so exchange the rendezvous by ``allGather``."""


@dataclass(frozen=True)
class Heartbeat:
    """From the hub to every node, and back: I am here."""


@dataclass(frozen=True)
class RanksStarted:
    """Node to driver: every rank of this node begins its work."""


@dataclass(frozen=True)
class Output:
    """Node to driver: bytes that a rank printed or told."""

    rank: int
    source: Source
    data: bytes


@dataclass(frozen=True)
class ValueStart:
    """Node to driver: a rank's pickled value comes, and is so long (bytes)."""

    rank: int
    size: int


@dataclass(frozen=True)
class ValuePart:
    """Node to driver: a piece of a rank's pickled value."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class ValueReceived:
    """Driver to node: the value arrived whole, so it need not travel through Spark."""

    rank: int


@dataclass(frozen=True)
class ValueRefused:
    """Driver to node: there is no more room here than so much (bytes), so keep the value."""

    rank: int
    room: int


@dataclass(frozen=True)
class Failed:
    """Node to driver: a rank failed."""

    failure: Failure


@dataclass(frozen=True)
class NodeDone:
    """Node to driver: every rank of this node has done its work."""


@dataclass(frozen=True)
class StackRequest:
    """Driver to nodes: report the stacks of your ranks."""


@dataclass(frozen=True)
class Stacks:
    """Node to driver: the Python stacks of its ranks that are at work, by rank."""

    stacks: dict[int, str]


@dataclass(frozen=True)
class Subscribed:
    """Node to driver: a rank wants to be told when the run is about to lose a process."""


@dataclass(frozen=True)
class Preempted:
    """The run is about to lose a process: from a node, or the driver itself, to every node."""


@dataclass(frozen=True)
class Stop:
    """Driver to nodes: stop your ranks."""

    reason: str


@dataclass(frozen=True)
class Release:
    """Driver to nodes: every rank has ended, so rank 0 need not serve the store any longer."""
