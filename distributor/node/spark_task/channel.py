"""How a node communicates with the driver and other nodes: over a link, or through Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distributor.core.versions import Software
from distributor.node.agent.agent import Agent
from distributor.node.agent.listener import AgentListener
from distributor.node.spark_task.result_rows import UnsentReports
from distributor.serialization.outcome import Failure, Value
from distributor.wire.messages import (
    NodeWarning,
    ProgramRelay,
    ProgramSource,
    ProgramStored,
    ProgramWanted,
    Rendezvous,
)


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


class Channel(AgentListener, Protocol):
    """A node's connection to the driver and the other nodes; a context manager.

    As the listener of the node's agent it passes on the ranks' output and the agent's events.
    """

    head_start: float
    """Seconds in which the driver may decide about a failure before the node does."""
    deadline_slack: float
    """Seconds past a deadline in which the driver may enforce it before the node does."""

    @property
    def unsent_reports(self) -> UnsentReports:
        """What ranks reported and no link could carry; the task's rows carry it instead."""

    def __enter__(self) -> Channel: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def attach(self, agent: Agent) -> None:
        """Forward the driver's requests to this agent from now on, and those that came earlier."""

    def exchange_rendezvous(
        self, own: Rendezvous | None, software: Software, warnings: Sequence[NodeWarning]
    ) -> Rendezvous:
        """Report on this node, and learn where rank 0's store listens.

        Parameters
        ----------
        own : Rendezvous or None
            Where the store listens, on the node that has rank 0.
        software : mapping of str to str
            This node's versions.
        warnings : sequence of NodeWarning
            What the user should know about this node.

        Raises
        ------
        StartTimeout
            If the other nodes have not reported in time.
        TaskFailed
            If the driver has ended the run.
        ExecutorNotReady
            If the versions of the nodes differ.
        """

    def find_program(self, wanted: ProgramWanted) -> ProgramSource | ProgramStored | None:
        """Learn where to receive the run's program from; None if there is no link to the driver.

        Raises
        ------
        StartTimeout
            If no other node could send it in time.
        TaskFailed
            If the driver has ended the run.
        """

    def send(self, message: ProgramRelay | ProgramStored) -> None:
        """Report to the driver how far the transfer of the program is."""

    def await_verdict(self, failures: Sequence[Failure]) -> bool:
        """Wait before failures end this task; return whether it fails, which ends all others."""

    def deliver(self, values: Sequence[Value]) -> Delivery:
        """Send the values of this node's ranks, which have all ended, to the driver."""
