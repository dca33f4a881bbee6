"""The messages that nodes and the driver exchange over the hub."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Final, Literal, NamedTuple

from distributor.errors import DistributorError
from distributor.rank.membership import Members
from distributor.serialization.outcome import Failure, Value

Stream = Literal["stdout", "stderr"]
# What ranks print and report, and the node's system metrics, which its first rank reports.
Source = Stream | Literal["progress", "usage"]

HERE: Final = -1
"""The node index of messages that the driver posts to itself."""


class Lost(enum.Enum):
    """Follows a node's last message; an Enum so that ``message is LOST`` narrows its type."""

    LOST = "lost"
    SILENT = "silent"


LOST: Final = Lost.LOST
SILENT: Final = Lost.SILENT
"""Comes before `LOST` if the connection is open, but the node has been silent for too long."""


@dataclass(frozen=True)
class Preparing:
    """Node to driver: this node is up, and prepares its ranks' environment."""

    host: str


class NodeWarning(NamedTuple):
    """A problem of a node that the user should know about and that does not stop the run."""

    text: str  # the same on all nodes that have the same problem
    detail: str = ""  # what differs between these nodes, such as figures


@dataclass(frozen=True)
class NodeUp:
    """Node to driver: this node's agent runs on this host, with these software versions.

    `executor` is the process that it is lost with, if that has other nodes too.
    """

    host: str
    software: Mapping[str, str]
    warnings: tuple[NodeWarning, ...] = ()
    executor: str = ""


@dataclass(frozen=True)
class Rendezvous:
    """The address of rank 0's store: from node 0 to the driver, which sends it to every node."""

    host: str
    port: int


@dataclass(frozen=True)
class Unlink:
    """Driver to nodes: a node cannot reach the hub, so all go on as if they had no link."""


@dataclass(frozen=True)
class Heartbeat:
    """From the hub to every node, and back: the sender is alive."""


@dataclass(frozen=True)
class RanksStarted:
    """Node to driver: every rank of this node has started its program."""


@dataclass(frozen=True)
class Output:
    """Node to driver: bytes that a rank printed or reported."""

    rank: int
    source: Source
    data: bytes


@dataclass(frozen=True)
class ValueStart:
    """Node to driver: a rank's pickled value of this size (bytes) follows."""

    rank: int
    size: int


@dataclass(frozen=True)
class ValuePart:
    """Node to driver: a piece of a rank's pickled value, which no pickle of the message copies."""

    rank: int
    data: bytes | memoryview

    def __reduce__(self) -> tuple[type[ValuePart], tuple[int, PickleBuffer]]:
        return ValuePart, (self.rank, PickleBuffer(self.data))


@dataclass(frozen=True)
class WholeValue:
    """Node to driver in the same process: the value itself."""

    value: Value


@dataclass(frozen=True)
class ValueReceived:
    """Driver to node: the whole value has arrived, so it need not be sent through Spark."""

    rank: int


@dataclass(frozen=True)
class ValueRefused:
    """Driver to node: the driver has only this much room (bytes), so keep the value."""

    rank: int
    room: int


@dataclass(frozen=True)
class Failed:
    """Node to driver: a rank failed."""

    failure: Failure


@dataclass(frozen=True)
class MembersChanged:
    """Driver to nodes: these ranks go on together, without those that are lost."""

    members: Members


@dataclass(frozen=True)
class ReplaceRank:
    """Driver to node: start a process that takes the place of a lost rank.

    The members without it come along, because the start may take longer than the others wait.
    """

    rank: int
    members: Members


@dataclass(frozen=True)
class EndRank:
    """Driver to node: kill a rank that hangs, for which the others wait; it has failed."""

    rank: int
    cause: str


@dataclass(frozen=True)
class NodeFailed:
    """Node to driver: an error of the node itself has ended it."""

    error: DistributorError


@dataclass(frozen=True)
class NodeDone:
    """Node to driver: every rank of this node has finished its program."""


@dataclass(frozen=True)
class Idle:
    """Node to driver: its ranks have done nothing for these seconds; 0.0 if they are active."""

    seconds: float


@dataclass(frozen=True)
class StackRequest:
    """Driver to nodes: report the stacks of your ranks."""


@dataclass(frozen=True)
class Stacks:
    """Node to driver: the Python stacks of its ranks that are at work, by rank."""

    stacks: dict[int, str]


@dataclass(frozen=True)
class Subscribed:
    """Node to driver: a rank wants a notice when the run is about to lose a process."""


@dataclass(frozen=True)
class Preempted:
    """Node to driver: a rank has received SIGTERM. Driver to nodes: hosts will lose processes."""

    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stop:
    """Driver to nodes: stop your ranks."""

    reason: str


@dataclass(frozen=True)
class Release:
    """Driver to nodes: every rank has ended, so rank 0 need no longer serve the store."""


@dataclass(frozen=True)
class MemberUp:
    """Task of a gang to driver: it holds a slot, and waits for assignments.

    `executor` is its executor, as its host, a colon, and its name there.
    """

    job: int
    partition: int
    executor: str


@dataclass(frozen=True)
class Assignment:
    """Driver to tasks of a gang: be nodes of an attempt.

    `spec` is a pickled `TaskSpec`, `executors` has those of all nodes, and `nodes` the node that
    each task is to be, by the number of its link.
    """

    serial: int
    spec: bytes
    executors: Mapping[int, str]
    nodes: Mapping[int, int]


@dataclass(frozen=True)
class AssignmentEnded:
    """Task of a gang to driver: its node has ended, with an error if it could not send that."""

    serial: int
    error: DistributorError | None = None


@dataclass(frozen=True)
class Dismissal:
    """Driver to tasks of a gang: give your slots back."""
