"""What is known about the nodes of an attempt."""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import BinaryIO

from distributor.control.run import Attempt, NodesEnded, NodeStarts, RunEvent
from distributor.control.waiting import Reminder
from distributor.core.resources import free_memory
from distributor.core.text import listed
from distributor.core.versions import Software
from distributor.errors import NodeLost, StartTimeout
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Failure, Outcome, Value
from distributor.wire.messages import (
    NodeUp,
    NodeWarning,
    Rendezvous,
    ValuePart,
    ValueReceived,
    ValueRefused,
    ValueStart,
)


class Nodes:
    """The nodes of an attempt, as they have reported.

    Attributes
    ----------
    present : set of int
        The nodes that the attempt has: without those that it goes on without, or that are joining.
    stores : dict of int to Rendezvous
        Where those that can serve a store listen.
    preparing : dict of int to str
        The hosts of nodes that make their environment ready, by node.
    hosts : dict of int to str
        The hosts of all nodes that have been up, by node. It also has those that ended since.
    first_up_at : float
        When the first node was up; 0 before.
    linked, started, working, done, unresponsive : set of int
        The nodes that are up and have a link, whose ranks started, that have been up and whose
        ranks have not all ended, whose ranks have ended, and that have not answered for as long as
        their lease.
    stopping : bool
        Whether the nodes were asked to stop, so that they close their links.
    software : dict of str to Software
        The versions of each node, by its description.
    warnings : dict of str to list of NodeWarning
        What the user should know about the nodes, by host.
    """

    def __init__(self, count: int, num_ranks: int) -> None:
        self.count = count
        self.present = set(range(count))
        self.stores: dict[int, Rendezvous] = {}
        self._ranks_per_node = num_ranks // count
        self.preparing: dict[int, str] = {}
        self.hosts: dict[int, str] = {}
        self._executors: dict[int, str] = {}
        self._lost_at: dict[str, float] = {}
        self.first_up_at = 0.0
        self.linked: set[int] = set()
        self.started: set[int] = set()
        self.working: set[int] = set()
        self.done: set[int] = set()
        self.software: dict[str, Software] = {}
        self.warnings: dict[str, list[NodeWarning]] = {}
        self.unresponsive: set[int] = set()
        self.stopping = False
        self._first_lost: int | None = None

    def come_up(self, node: int, message: NodeUp, now: float) -> None:
        """Note that a node is ready to start its ranks."""
        self.preparing.pop(node, None)
        self.first_up_at = self.first_up_at or now
        self.hosts[node] = message.host
        self._executors[node] = message.executor or f"node {node}"
        self.software[f"{message.host} (node {node})"] = message.software
        self.warnings.setdefault(message.host, []).extend(message.warnings)
        self.linked.add(node)
        self.working.add(node)

    def lost_beside(self, node: int) -> float:
        """Return when a rank or a node of the same executor was lost, with those soon after it."""
        return self._lost_at.get(self._executors[node], -math.inf)

    def note_loss(self, node: int, now: float) -> None:
        """Note that ranks of a node are lost."""
        self._lost_at[self._executors[node]] = now

    def leave(self, node: int) -> None:
        """Go on without a node."""
        for nodes in (self.present, self.linked, self.working, self.started, self.unresponsive):
            nodes.discard(node)
        self.stores.pop(node, None)
        if self._first_lost == node:
            self._first_lost = None

    def lose_link(self, node: int) -> None:
        self.linked.discard(node)
        self.preparing.pop(node, None)
        if self._first_lost is None and not self.stopping and node in self.working:
            self._first_lost = node

    @property
    def store(self) -> tuple[str, int] | None:
        """The address of a store of a node whose ranks are at work; None if there is none."""
        serving = self.stores.keys() & self.present & self.working
        if not serving:
            return None
        # Rather not one whose executor has just lost others.
        node = min(serving, key=lambda each: (self._lost_at.get(self._executors[each], 0.0), each))
        address = self.stores[node]
        return address.host, address.port

    @property
    def all_up(self) -> bool:
        """Whether all nodes have been up."""
        return self.hosts.keys() >= self.present

    @property
    def all_done(self) -> bool:
        """Whether the ranks of all nodes have ended."""
        return self.done >= self.present

    @property
    def lost(self) -> set[int]:
        """The nodes that stopped responding before their ranks ended."""
        return self.unresponsive & self.working

    @property
    def first_lost(self) -> str:
        """The ranks and the host of the first node that lost its link at work; empty if none."""
        return "" if self._first_lost is None else self.describe({self._first_lost})

    @property
    def unreported(self) -> list[int]:
        """The nodes that have never been up, as far as the driver knows."""
        return sorted(self.present - self.hosts.keys())

    @property
    def unlinked(self) -> list[int]:
        """The nodes that have no link now."""
        return sorted(self.present - self.linked)

    def describe(self, nodes: set[int]) -> str:
        """Return the ranks and hosts of nodes that have been up."""
        return ", ".join(f"{self._describe(node)} on {self.hosts[node]}" for node in sorted(nodes))

    def describe_ranks(self, node: int, ranks: Collection[int]) -> str:
        """Return the ranks of a node that are at work, with its host."""
        if len(ranks) in (0, self._ranks_per_node):
            return self.describe({node})
        return ", ".join(f"rank {rank} on {self.hosts[node]}" for rank in sorted(ranks))

    def ranks_on(self, hosts: Container[str]) -> dict[str, list[int]]:
        """Return the ranks of the nodes that have been up, by host, for some hosts."""
        ranks: dict[str, list[int]] = {}
        for node, host in sorted(self.hosts.items()):
            if host in hosts:
                ranks.setdefault(host, []).extend(self.ranks_of(node))
        return ranks

    def _describe(self, node: int) -> str:
        ranks = self.ranks_of(node)
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self._ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(node * self._ranks_per_node, (node + 1) * self._ranks_per_node)


LINK_SECONDS = 60.0
"""Seconds from the start of all tasks after which nodes that have not reported have no link.

Their Python has to start, and then each tries to connect for a few seconds. This holds for a Spark
that does not report barriers, as through Connect; also from the first node that is up to the last.
"""


class RendezvousDecision:
    """Decides, once, how the nodes of an attempt agree on the address of rank 0's store.

    Parameters
    ----------
    nodes : Nodes
        The nodes, as they have reported.
    deadline : float
        When ``start_timeout`` ends.

    Attributes
    ----------
    decision : RunEvent or None
        `ALL_NODES_UP` if they agree through the hub; `NODES_UNLINKED` if some nodes have no link,
        so all go on without one.
    """

    def __init__(self, nodes: Nodes, deadline: float) -> None:
        self._nodes = nodes
        self._deadline = deadline
        self._reminder: Reminder | None = None
        self.decision: RunEvent | None = None

    def decide(self, starts: NodeStarts, now: float) -> RunEvent | None:
        """Return what was decided, or None as long as it is too early."""
        self.decision = self._decide(starts, now)
        return self.decision

    @property
    def late_nodes(self) -> set[int]:
        """The nodes that can report that their ranks have started, and have not."""
        expected = set() if self.decision is RunEvent.NODES_UNLINKED else self._nodes.present
        return expected - self._nodes.started

    def _decide(self, starts: NodeStarts, now: float) -> RunEvent | None:
        self._remind()
        nodes = self._nodes
        if 0 in nodes.stores and not nodes.unlinked:
            return RunEvent.ALL_NODES_UP
        starts.poll()
        if not nodes.preparing and not nodes.hosts:
            return self._await_starts(starts, now)
        if not nodes.preparing and self._is_node_missing(starts, now):
            return RunEvent.NODES_UNLINKED
        if now > self._deadline:
            raise StartTimeout(f"After start_timeout, {self._missing()}.")
        return None

    def _missing(self) -> str:
        if self._nodes.preparing:
            return self._unprepared()
        return f"nothing was received from {listed('task', self._nodes.unreported)}"

    def _is_node_missing(self, starts: NodeStarts, now: float) -> bool:
        """Return whether a node has no link, or lost it, or (for want of facts) is late.

        If Spark reports which nodes have none, all others must be up: none is waited for in vain.
        """
        if starts.reports_unlinked:
            others = len(self._nodes.unlinked)
            return starts.all_unlinked or 0 < others <= starts.num_unlinked
        return now > self._nodes.first_up_at + LINK_SECONDS

    def _await_starts(self, starts: NodeStarts, now: float) -> RunEvent | None:
        """Find out from the launcher whether nodes that have not reported run at all."""
        expired = now > self._deadline
        # If it does not say whether they have started, they may run, and their work be lost.
        late = starts.all_started_for(LINK_SECONDS) or (expired and starts.are_unknown)
        if starts.all_unlinked or (late and not starts.reports_unlinked):
            return RunEvent.NODES_UNLINKED
        if expired and (starts.are_pending or starts.reports_unlinked):
            raise StartTimeout(f"After start_timeout, {starts.shortfall()}")
        starts.show_shortfall()
        return None

    def _remind(self) -> None:
        """Show which environments are not ready, at the intervals of a reminder."""
        if not self._nodes.preparing:
            self._reminder = None
            return
        self._reminder = self._reminder or Reminder()
        self._reminder.show(lambda: f"{self._unprepared()}.")

    def _unprepared(self) -> str:
        hosts = sorted(set(self._nodes.preparing.values()))
        return f"the environment or the data is not ready on {', '.join(hosts)}"


@dataclass
class _Transfer:
    file: BinaryIO
    missing: int


class Outcomes:
    """The failures and values of an attempt's ranks.

    Attributes
    ----------
    failures : list of Failure
        The failures of the attempt, which nodes reported, in the order of their receipt.
    values : dict of int to Value
        The complete values that came over links, by rank.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._num_ranks = attempt.num_ranks
        self.failures = attempt.failures
        self.values: dict[int, Value] = {}
        self._transfers: dict[int, _Transfer] = {}

    @property
    def has_cause(self) -> bool:
        """Whether a failure can be the cause of the others."""
        return not all(failure.collateral for failure in self.failures)

    @property
    def all_failed(self) -> bool:
        """Whether every rank has failed, so that no further failure can follow."""
        return len({failure.origin.rank for failure in self.failures}) == self._num_ranks

    def start_value(self, message: ValueStart) -> ValueRefused | None:
        """Reserve memory for a value; return a refusal for its node if there is too little."""
        room = free_memory() - sum(transfer.missing for transfer in self._transfers.values())
        if message.size > room:
            return ValueRefused(message.rank, max(room, 0))
        self._transfers[message.rank] = _Transfer(anonymous_file(), message.size)
        return None

    def add_part(self, part: ValuePart) -> ValueReceived | None:
        """Write a part of a value; return a receipt for its node after the last part."""
        transfer = self._transfers.get(part.rank)
        if transfer is None:
            return None  # sent before its node had read the refusal
        transfer.file.write(part.data)
        transfer.missing -= len(part.data)
        if transfer.missing:
            return None
        self.values[part.rank] = Value(part.rank, self._transfers.pop(part.rank).file)
        return ValueReceived(part.rank)

    def discard_values(self) -> None:
        for value in self.values.values():
            value.file.close()

    def discard_incomplete(self) -> None:
        for transfer in self._transfers.values():
            transfer.file.close()

    def of(self, ending: NodesEnded, first_lost: str) -> list[Outcome]:
        """Return the outcomes of an attempt whose nodes have ended."""
        if ending.error is None:
            return [*self.failures, *{**ending.values(), **self.values}.values()]
        reported = {failure.origin.rank for failure in self.failures}
        others = (each for each in ending.failures if each.origin.rank not in reported)
        failures = [*self.failures, *others]
        if all(failure.collateral for failure in failures):
            _raise_cause(ending, failures, first_lost)
        return [*failures, *self.values.values()]


def _raise_cause(ending: NodesEnded, failures: list[Failure], first_lost: str) -> None:
    """Raise what the launcher knows of ranks that reported nothing but lost connections."""
    assert ending.error is not None
    explained = ending.timed_out or ending.explain(ending.error, first_lost)
    if explained is ending.error:
        raise explained
    if ending.timed_out:
        raise ending.timed_out from ending.error
    if not failures or isinstance(explained, NodeLost):
        raise explained from ending.error
