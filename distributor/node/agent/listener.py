"""The events of a node's ranks, as their agent reports them."""

from __future__ import annotations

from typing import Protocol

from distributor.serialization.outcome import Failure
from distributor.wire.messages import Source


class Sink(Protocol):
    """Receives what ranks print and report."""

    def write(self, rank: int, source: Source, data: bytes) -> None: ...

    def has_room(self) -> bool:
        """Return whether the sink can take more now; if not, the bytes stay in the rank's file."""


class AgentListener(Sink, Protocol):
    """Receives what the ranks of one node print and report, and the events of their lives.

    All methods are called on the thread that runs `Agent.run`, and must not block.
    """

    def on_ranks_started(self) -> None:
        """Called once, when every rank of the node has begun its work."""

    def on_rank_failed(self, failure: Failure) -> None:
        """Called for each failure, in the order in which the failures become known."""

    def on_idle(self, seconds: float) -> None:
        """Called again and again while all ranks are idle, with the seconds since they are.

        It is called with 0.0 once they are active again.
        """

    def on_stacks(self, stacks: dict[int, str]) -> None:
        """Called after `Agent.request_stacks`, with the stacks of the active ranks, by rank."""

    def on_work_done(self) -> None:
        """Called once, when every rank of the node has done its work.

        Rank 0 then still serves the rendezvous store, until `Agent.release`.
        """

    def on_preemption_subscribed(self) -> None:
        """Called when a rank subscribes to preemption notices."""

    def on_sigterm(self) -> None:
        """Called when a rank that subscribes to preemption notices has received SIGTERM."""
