"""What is known about the nodes of an attempt."""

from __future__ import annotations

from collections.abc import Collection, Container

from distributor.core.versions import Software
from distributor.wire.messages import NodeUp, NodeWarning


class Nodes:
    """The nodes of an attempt, as they have reported.

    Attributes
    ----------
    preparing : dict of int to str
        The hosts of nodes that make their environment ready, by node.
    hosts : dict of int to str
        The hosts of all nodes that have been up, by node. It also has those that ended since.
    first_up_at : float
        When the first node was up; 0 before.
    linked, started, working, done : set of int
        The nodes that are up and have a link, whose ranks started, that have been up and whose
        ranks have not all ended, and whose ranks have ended.
    software : dict of str to Software
        The versions of each node, by its description.
    warnings : dict of str to list of NodeWarning
        What the user should know about the nodes, by host.
    """

    def __init__(self, count: int, ranks_per_node: int) -> None:
        self.count = count
        self._ranks_per_node = ranks_per_node
        self.preparing: dict[int, str] = {}
        self.hosts: dict[int, str] = {}
        self.first_up_at = 0.0
        self.linked: set[int] = set()
        self.started: set[int] = set()
        self.working: set[int] = set()
        self.done: set[int] = set()
        self.software: dict[str, Software] = {}
        self.warnings: dict[str, list[NodeWarning]] = {}
        self._unresponsive: set[int] = set()
        self._first_lost: int | None = None
        self._stopping = False

    def come_up(self, node: int, message: NodeUp, now: float) -> None:
        """Note that a node is ready to start its ranks."""
        self.preparing.pop(node, None)
        self.first_up_at = self.first_up_at or now
        self.hosts[node] = message.host
        self.software[f"{message.host} (node {node})"] = message.software
        self.warnings.setdefault(message.host, []).extend(message.warnings)
        self.linked.add(node)
        self.working.add(node)

    def finish(self, node: int) -> None:
        """Note that a node's ranks have ended."""
        self.done.add(node)
        self.working.discard(node)

    def stop(self) -> None:
        """Note that the nodes were asked to stop, so that they close their links."""
        self._stopping = True

    def lose_link(self, node: int) -> None:
        self.linked.discard(node)
        self.preparing.pop(node, None)
        if self._first_lost is None and not self._stopping and node in self.working:
            self._first_lost = node

    def stop_responding(self, node: int) -> None:
        """Note that a node has not answered for as long as its lease."""
        self._unresponsive.add(node)

    @property
    def all_up(self) -> bool:
        """Whether all nodes have been up."""
        return len(self.hosts) == self.count

    @property
    def all_done(self) -> bool:
        """Whether the ranks of all nodes have ended."""
        return len(self.done) == self.count

    @property
    def lost(self) -> set[int]:
        """The nodes that stopped responding before their ranks ended."""
        return self._unresponsive & self.working

    @property
    def first_lost(self) -> str:
        """The ranks and the host of the first node that lost its link at work; empty if none."""
        return "" if self._first_lost is None else self.describe({self._first_lost})

    @property
    def unreported(self) -> list[int]:
        """The nodes that have never been up, as far as the driver knows."""
        return sorted(set(range(self.count)) - self.hosts.keys())

    @property
    def unlinked(self) -> list[int]:
        """The nodes that have no link now."""
        return sorted(set(range(self.count)) - self.linked)

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

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(node * self._ranks_per_node, (node + 1) * self._ranks_per_node)
