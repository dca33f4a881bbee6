"""The states of a node, and what leads from one to another."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Protocol

from distributor.core.states import StateMachine, Table


class NodeState(enum.Enum):
    """How far a node is."""

    STARTING = "starting"
    """The node tries to connect to the driver."""
    PREPARING = "preparing"
    """The interpreter and the packages of the ranks are made ready."""
    RENDEZVOUS = "rendezvous"
    """The node waits for the other nodes, to learn where rank 0's store listens."""
    RUNNING = "running"
    """The agent starts the ranks, and they work."""
    SERVING = "serving"
    """The node's ranks have done their work. Rank 0 still serves the rendezvous store."""
    DELIVERING = "delivering"
    """All ranks have ended. Their values go to the driver."""
    DONE = "done"
    """The values are handed over, and the node has succeeded."""
    FAILED = "failed"
    """A rank of this node failed, or the node itself."""
    STOPPED = "stopped"
    """The driver has ended the attempt. The node has no cause of its own."""
    LOST_DRIVER = "lost driver"
    """The driver is gone or cannot be reached. The node has no cause of its own."""


class NodeEvent(enum.Enum):
    """What changes the state of a node."""

    CONNECTED = "connected"
    """The node has a link to the driver, or goes on without one."""
    ENVIRONMENT_READY = "environment ready"
    """The interpreter of the ranks is ready."""
    RENDEZVOUS_KNOWN = "rendezvous known"
    """The address of rank 0's store is known."""
    WORK_DONE = "work done"
    """Every rank of the node has done its work."""
    RANKS_ENDED = "ranks ended"
    """The processes of all ranks have ended."""
    VALUES_DELIVERED = "values delivered"
    """The driver, or the launcher, has all values of the node's ranks."""
    RANK_FAILED = "rank failed"
    """A rank of the node failed."""
    ERROR_RAISED = "error raised"
    """An exception ends the node: a deadline, a missing requirement, a value that is too large."""
    STOP_RECEIVED = "stop received"
    """The driver has sent `Stop`."""
    DRIVER_LOST = "driver lost"
    """The driver is known to be gone, or could not be reached for too long."""


class Owner(Protocol):
    """What the actions of the table need of a node."""

    def report_preparing(self) -> None: ...

    def report_work_done(self) -> None: ...

    def stop_ranks(self) -> None: ...


def _prepare(node: Owner) -> None:
    """Report to the driver, if there is a link, and make the environment ready."""
    node.report_preparing()


def _join(node: Owner) -> None:
    """Report versions and warnings, and wait for the address of rank 0's store."""


def _start(node: Owner) -> None:
    """Check that the store can be reached, and start the ranks."""


def _serve(node: Owner) -> None:
    """Report it, and release rank 0 once all nodes have done so.

    If the link is lost, that is 30 s later.
    """
    node.report_work_done()


def _deliver(node: Owner) -> None:
    """Send the values over the link, and the rest as the launcher does."""


def _finish(node: Owner) -> None:
    """End."""


def _report_failure(node: Owner) -> None:
    """Report it. The driver decides when the other ranks stop, or the node if there is no link."""


def _fail(node: Owner) -> None:
    """Stop the ranks and raise the error."""


def _stop_before(node: Owner) -> None:
    """Fail at the rendezvous, before ranks are started."""
    node.stop_ranks()


def _stop(node: Owner) -> None:
    """Stop the ranks."""
    node.stop_ranks()


_BEFORE_RANKS = (NodeState.STARTING, NodeState.PREPARING, NodeState.RENDEZVOUS)
_WITH_RANKS = (NodeState.RUNNING, NodeState.SERVING)
_ENDS = (
    (NodeEvent.STOP_RECEIVED, NodeState.STOPPED),
    (NodeEvent.DRIVER_LOST, NodeState.LOST_DRIVER),
)

TRANSITIONS: Table[NodeState] = {
    (NodeState.STARTING, NodeEvent.CONNECTED): (NodeState.PREPARING, _prepare),
    (NodeState.PREPARING, NodeEvent.ENVIRONMENT_READY): (NodeState.RENDEZVOUS, _join),
    (NodeState.RENDEZVOUS, NodeEvent.RENDEZVOUS_KNOWN): (NodeState.RUNNING, _start),
    (NodeState.RUNNING, NodeEvent.WORK_DONE): (NodeState.SERVING, _serve),
    (NodeState.SERVING, NodeEvent.RANKS_ENDED): (NodeState.DELIVERING, _deliver),
    (NodeState.DELIVERING, NodeEvent.VALUES_DELIVERED): (NodeState.DONE, _finish),
    (NodeState.RUNNING, NodeEvent.RANK_FAILED): (NodeState.FAILED, _report_failure),
    **{
        (state, NodeEvent.ERROR_RAISED): (NodeState.FAILED, _fail)
        for state in (*_BEFORE_RANKS, *_WITH_RANKS, NodeState.DELIVERING)
    },
    **{
        (state, event): (next_state, _stop_before)
        for state in _BEFORE_RANKS
        for event, next_state in _ENDS
    },
    **{
        (state, event): (next_state, _stop)
        for state in (*_WITH_RANKS, NodeState.FAILED)
        for event, next_state in _ENDS
    },
}
"""The next state, and what the node does, for each event that a state allows.

All other events are ignored. They come too late to matter: the driver sends `Stop`, or is lost,
while the node delivers its values, which it then completes without the link; or the environment is
ready after the driver has ended the run, which the rendezvous then reports.

A lost link is no event of this table, because the run goes on without it. In RENDEZVOUS the
address is then exchanged through the launcher, in RUNNING output is kept for it, in SERVING rank 0
is released after a while, and in DELIVERING the launcher carries the values.
"""

ENDED_BY_DRIVER = frozenset({NodeState.STOPPED, NodeState.LOST_DRIVER})
"""The states of a node whose run has ended elsewhere."""


class NodeLifecycle:
    """The state of one node, which its main thread, its link and the lease change."""

    def __init__(self, node: Owner) -> None:
        self._machine = StateMachine(TRANSITIONS, NodeState.STARTING, node)
        self._changed = threading.Condition(threading.RLock())

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
