"""The states of a node inside a Spark barrier task, and what leads from one to another."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from distributor.core.states import StateMachine, Table


class NodeState(enum.Enum):
    """How far a node is."""

    STARTING = "starting"
    """The task runs. The node checks its GPUs and tries to connect to the driver's hub."""
    PREPARING = "preparing"
    """The interpreter and the packages of the ranks are made ready."""
    RENDEZVOUS = "rendezvous"
    """The node waits for the other nodes, to learn where rank 0's store listens."""
    RUNNING = "running"
    """The agent starts the ranks, and they work."""
    SERVING = "serving"
    """The node's ranks have done their work. Rank 0 still serves the rendezvous store."""
    DELIVERING = "delivering"
    """All ranks have ended. Their values go to the driver, over the link or as rows."""
    DONE = "done"
    """The values are handed over, and the task succeeds."""
    FAILED = "failed"
    """A rank of this node failed, or the node itself. The task fails with the cause."""
    STOPPED = "stopped"
    """The driver has ended the attempt. The task fails without a cause of its own, or succeeds
    without values if another attempt is to follow."""
    LOST_DRIVER = "lost driver"
    """The driver is gone or cannot be reached. The task fails without a cause of its own."""


class NodeEvent(enum.Enum):
    """What changes the state of a node."""

    CHANNEL_OPENED = "channel opened"
    """The node is connected to the hub, or goes on without a link."""
    ENVIRONMENT_READY = "environment ready"
    """The interpreter of the ranks is ready."""
    RENDEZVOUS_KNOWN = "rendezvous known"
    """The address of rank 0's store is known, through the hub or through Spark."""
    WORK_DONE = "work done"
    """Every rank of the node has done its work."""
    RANKS_ENDED = "ranks ended"
    """The processes of all ranks have ended."""
    VALUES_DELIVERED = "values delivered"
    """The driver, or Spark, has all values of the node's ranks."""
    RANK_FAILED = "rank failed"
    """A rank of the node failed."""
    ERROR_RAISED = "error raised"
    """An exception ends the task: a deadline, a missing requirement, a value that is too large."""
    STOP_RECEIVED = "stop received"
    """The driver has sent `Stop`."""
    LEASE_EXPIRED = "lease expired"
    """The driver is known to be gone, or could not be reached for too long."""


_BEFORE_RANKS = (NodeState.STARTING, NodeState.PREPARING, NodeState.RENDEZVOUS)
_WITH_RANKS = (NodeState.RUNNING, NodeState.SERVING)

TRANSITIONS: Table[NodeState] = {
    (NodeState.STARTING, NodeEvent.CHANNEL_OPENED): (
        NodeState.PREPARING,
        "Report to the driver, if there is a link, and make the environment ready.",
    ),
    (NodeState.PREPARING, NodeEvent.ENVIRONMENT_READY): (
        NodeState.RENDEZVOUS,
        "Report versions and warnings, and wait for the address of rank 0's store.",
    ),
    (NodeState.RENDEZVOUS, NodeEvent.RENDEZVOUS_KNOWN): (
        NodeState.RUNNING,
        "Check that the store can be reached, and start the ranks.",
    ),
    (NodeState.RUNNING, NodeEvent.WORK_DONE): (
        NodeState.SERVING,
        "Report it, and release rank 0 once all nodes have done so (30 s later if the link is "
        "lost).",
    ),
    (NodeState.SERVING, NodeEvent.RANKS_ENDED): (
        NodeState.DELIVERING,
        "Send the values over the link, and the rest as rows.",
    ),
    (NodeState.DELIVERING, NodeEvent.VALUES_DELIVERED): (NodeState.DONE, "End the task."),
    (NodeState.RUNNING, NodeEvent.RANK_FAILED): (
        NodeState.FAILED,
        "Report it. The driver decides when the other ranks stop, or the node if there is no link.",
    ),
    **{
        (state, NodeEvent.ERROR_RAISED): (
            NodeState.FAILED,
            "Stop the ranks and raise the error in the task.",
        )
        for state in (*_BEFORE_RANKS, *_WITH_RANKS, NodeState.DELIVERING)
    },
    **{
        (state, event): (next_state, "Fail the task at the rendezvous, before ranks are started.")
        for state in _BEFORE_RANKS
        for event, next_state in (
            (NodeEvent.STOP_RECEIVED, NodeState.STOPPED),
            (NodeEvent.LEASE_EXPIRED, NodeState.LOST_DRIVER),
        )
    },
    **{
        (state, event): (next_state, "Stop the ranks, and fail the task.")
        for state in (*_WITH_RANKS, NodeState.FAILED)
        for event, next_state in (
            (NodeEvent.STOP_RECEIVED, NodeState.STOPPED),
            (NodeEvent.LEASE_EXPIRED, NodeState.LOST_DRIVER),
        )
    },
}
"""The next state, and what the node does, for each event that a state allows.

All other events are ignored. They come too late to matter: the driver sends `Stop`, or is lost,
while the node delivers its values, which it then completes through Spark; or the environment is
ready after the driver has ended the run, which the rendezvous then reports.

A lost link is no event of this table, because the run goes on through Spark. In RENDEZVOUS the
address is then exchanged through Spark, in RUNNING output is kept for the task's rows, in SERVING
rank 0 is released after a while, and in DELIVERING values become rows.
"""

ENDED_BY_DRIVER = frozenset({NodeState.STOPPED, NodeState.LOST_DRIVER})
"""The states of a node whose run has ended elsewhere."""


class NodeLifecycle:
    """The state of one node, which the task, the link and the lease change from their threads.

    A context manager: an exception that leaves it is the event `NodeEvent.ERROR_RAISED`.
    """

    def __init__(self) -> None:
        self._machine = StateMachine(TRANSITIONS, NodeState.STARTING)
        self._changed = threading.Condition()

    def __enter__(self) -> NodeLifecycle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self.fire(NodeEvent.ERROR_RAISED)

    @property
    def state(self) -> NodeState:
        return self._machine.state

    @property
    def is_ended_by_driver(self) -> bool:
        """Whether the driver has ended the run, or is lost."""
        return self.state in ENDED_BY_DRIVER

    def fire(self, event: NodeEvent) -> bool:
        """Change the state as `TRANSITIONS` has it; return False if the state ignores the event."""
        with self._changed:
            changed = self._machine.fire(event)
            self._changed.notify_all()
        return changed

    def notify(self) -> None:
        """Have `wait_for` look at its condition again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds, after a change of the state or `notify`, or time is up."""
        with self._changed:
            self._changed.wait_for(condition, seconds)
