"""How the nodes agree on the address of rank 0's store: through the hub, or through Spark."""

from __future__ import annotations

import time
from typing import Literal

from distributor.core.text import listed
from distributor.errors import StartTimeout
from distributor.launch.spark.monitor.nodes import Nodes
from distributor.launch.spark.monitor.run_state import RunEvent
from distributor.launch.spark.monitor.task_starts import TaskStarts
from distributor.launch.spark.polling import Reminder
from distributor.wire.messages import Rendezvous

NODE_UP_SECONDS = 10.0
"""Seconds from the first node that is up to the last, before Spark is used instead of the hub.

This and `LINK_SECONDS` hold for a Spark that does not report barriers, as through Connect. It is
longer than a node tries to connect. A node that is only slow delays the others by no more than a
second.
"""
LINK_SECONDS = 60.0
"""Seconds from the start of all tasks after which nodes that have not reported have no link.

Their Python has to start, and then each tries to connect for a few seconds.
"""


class RendezvousDecision:
    """Decides, once, how the nodes of an attempt agree on the address of rank 0's store.

    Parameters
    ----------
    nodes : Nodes
        The nodes, as they have reported.
    deadline : float
        When, by ``time.monotonic``, ``start_timeout`` ends.

    Attributes
    ----------
    address : Rendezvous or None
        The address of rank 0's store, once its node has reported it.
    method : "hub", "spark" or None
        What was decided.
    """

    def __init__(self, nodes: Nodes, deadline: float) -> None:
        self._nodes = nodes
        self._deadline = deadline
        self._reminder: Reminder | None = None
        self.address: Rendezvous | None = None
        self.method: Literal["hub", "spark"] | None = None

    def decide(self, tasks: TaskStarts) -> RunEvent | None:
        """Return what was decided, or None as long as it is too early.

        Parameters
        ----------
        tasks : TaskStarts
            What Spark reports of the job's tasks; it is asked until all nodes have reported.

        Raises
        ------
        StartTimeout
            If the deadline has passed and some nodes have not started or not reported.
        """
        event = self._decide(time.monotonic(), tasks)
        if event is not None:
            self.method = "hub" if event is RunEvent.ALL_NODES_UP else "spark"
        return event

    @property
    def has_late_nodes(self) -> bool:
        """Whether there are such nodes as `late_nodes` returns."""
        nodes = self._nodes
        if self.method == "spark":
            return not nodes.linked <= nodes.started
        return len(nodes.started) < nodes.count

    def late_nodes(self) -> set[int]:
        """Return the nodes that can report that their ranks have started, and have not."""
        nodes = self._nodes
        expected = nodes.linked if self.method == "spark" else range(nodes.count)
        return set(expected) - nodes.started

    def _decide(self, now: float, tasks: TaskStarts) -> RunEvent | None:
        self._remind()
        nodes = self._nodes
        if self.address and nodes.all_up:
            return RunEvent.ALL_NODES_UP
        tasks.poll()
        if not nodes.preparing and not nodes.hosts:
            return self._await_tasks(now, tasks)
        if not nodes.preparing and self._is_node_missing(now, tasks):
            return RunEvent.SOME_NODES_UNLINKED if nodes.linked else RunEvent.ALL_NODES_UNLINKED
        if now > self._deadline:
            raise StartTimeout(f"After start_timeout, {self._missing()}.")
        return None

    def _missing(self) -> str:
        if self._nodes.preparing:
            return self._unprepared()
        return f"nothing was received from {listed('task', self._nodes.unreported)}"

    def _is_node_missing(self, now: float, tasks: TaskStarts) -> bool:
        """Return whether a node has lost its link, has none, or (for want of facts) is late."""
        nodes = self._nodes
        if len(nodes.linked) < len(nodes.hosts):
            return True
        if tasks.report_barriers:
            return tasks.any_in_barrier
        return now > nodes.first_up_at + NODE_UP_SECONDS

    def _await_tasks(self, now: float, tasks: TaskStarts) -> RunEvent | None:
        """Find out from Spark whether nodes that have not reported run at all."""
        expired = now > self._deadline
        # If Spark does not say whether they have started, they may run, and their work be lost.
        late = tasks.all_started_for(LINK_SECONDS) or (expired and tasks.are_unknown)
        if tasks.all_passed_barrier or (late and not tasks.report_barriers):
            return RunEvent.ALL_NODES_UNLINKED
        if expired and (tasks.are_pending or tasks.report_barriers):
            raise StartTimeout(f"After start_timeout, {tasks.shortfall()}")
        tasks.show_shortfall()
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
