"""How the nodes agree on the address of rank 0's store: through the hub, or without links."""

from __future__ import annotations

import enum

from distributor.control.nodes import Nodes
from distributor.control.polling import Reminder
from distributor.control.run import NodeStarts
from distributor.core.text import listed
from distributor.errors import StartTimeout
from distributor.wire.messages import Rendezvous

LINK_SECONDS = 60.0
"""Seconds from the start of all tasks after which nodes that have not reported have no link.

Their Python has to start, and then each tries to connect for a few seconds. This holds for a Spark
that does not report barriers, as through Connect; also from the first node that is up to the last.
"""


class Way(enum.Enum):
    """How nodes agree on a rendezvous."""

    HUB = enum.auto()
    UNLINKED = enum.auto()
    """Some nodes have no link, so all go on without one."""


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
    address : Rendezvous or None
        The address of rank 0's store, once its node has reported it.
    way : Way or None
        What was decided.
    """

    def __init__(self, nodes: Nodes, deadline: float) -> None:
        self._nodes = nodes
        self._deadline = deadline
        self._reminder: Reminder | None = None
        self.address: Rendezvous | None = None
        self.way: Way | None = None

    def decide(self, starts: NodeStarts, now: float) -> Way | None:
        """Return what was decided, or None as long as it is too early."""
        self.way = self._decide(starts, now)
        return self.way

    @property
    def late_nodes(self) -> set[int]:
        """The nodes that can report that their ranks have started, and have not."""
        expected = () if self.way is Way.UNLINKED else range(self._nodes.count)
        return set(expected) - self._nodes.started

    def _decide(self, starts: NodeStarts, now: float) -> Way | None:
        self._remind()
        nodes = self._nodes
        if self.address and len(nodes.linked) == nodes.count:
            return Way.HUB
        starts.poll()
        if not nodes.preparing and not nodes.hosts:
            return self._await_starts(starts, now)
        if not nodes.preparing and self._is_node_missing(starts, now):
            return Way.UNLINKED
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
            others = self._nodes.count - len(self._nodes.linked)
            return starts.all_unlinked or 0 < others <= starts.num_unlinked
        return now > self._nodes.first_up_at + LINK_SECONDS

    def _await_starts(self, starts: NodeStarts, now: float) -> Way | None:
        """Find out from the launcher whether nodes that have not reported run at all."""
        expired = now > self._deadline
        # If it does not say whether they have started, they may run, and their work be lost.
        late = starts.all_started_for(LINK_SECONDS) or (expired and starts.are_unknown)
        if starts.all_unlinked or (late and not starts.reports_unlinked):
            return Way.UNLINKED
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
