"""The states of an attempt on a cluster, and what leads from one to another."""

from __future__ import annotations

import enum

from distributor.core.states import StateMachine, Table


class RunState(enum.Enum):
    """How far an attempt is, as the driver knows it."""

    WAITING = "waiting"
    """Nodes report one by one. It is not decided yet how they agree on a rendezvous."""
    STARTING = "starting"
    """The nodes agree on a rendezvous and start their ranks."""
    UNLINKED = "unlinked"
    """No node has a link to the driver, which knows only what Spark reports of the job."""
    RUNNING = "running"
    """The ranks of all nodes that can report it have started."""
    STOPPING = "stopping"
    """A rank failed, and the nodes stop the others."""
    COLLECTING_STACKS = "collecting stacks"
    """A deadline has passed. The nodes report the stacks of their ranks for the error."""
    DRAINING = "draining"
    """The Spark job has ended. Messages that were sent before are still received."""
    ABORTING = "aborting"
    """The driver raises an error. The nodes stop their ranks, and the job is cancelled."""
    ENDED = "ended"
    """All messages have been received."""


class RunEvent(enum.Enum):
    """What changes the state of an attempt."""

    ALL_NODES_UP = "all nodes up"
    """All nodes have a link and have reported, so they agree on a rendezvous through the hub."""
    SOME_NODES_UNLINKED = "some nodes unlinked"
    """Some nodes did not report in time, or lost their link."""
    ALL_NODES_UNLINKED = "all nodes unlinked"
    """No node has a link, although Spark has started the tasks or does not say whether it has."""
    RANKS_STARTED = "ranks started"
    """Every node with a link has reported that its ranks run."""
    FAILURE_SETTLED = "failure settled"
    """A rank failed, and the other ranks have had the time to report failures of their own."""
    DEADLINE_PASSED = "deadline passed"
    """``start_timeout``, ``timeout`` or ``stall_timeout`` has passed; ranks may have stacks."""
    JOB_ENDED = "job ended"
    """Spark returned the job's rows, or raised."""
    ERROR_RAISED = "error raised"
    """A deadline passed, a node was lost, the run was cancelled or this process interrupted."""
    DRAINED = "drained"
    """All links are closed, or the time for it is over."""


_BEFORE_ITS_END = (
    RunState.WAITING,
    RunState.STARTING,
    RunState.UNLINKED,
    RunState.RUNNING,
    RunState.STOPPING,
)
_WITH_RANKS = _BEFORE_ITS_END[1:]

TRANSITIONS: Table[RunState] = {
    (RunState.WAITING, RunEvent.ALL_NODES_UP): (
        RunState.STARTING,
        "Compare the nodes' versions, and send all nodes the address of rank 0's store.",
    ),
    (RunState.WAITING, RunEvent.SOME_NODES_UNLINKED): (
        RunState.STARTING,
        "Ask the nodes with a link to exchange the address through Spark.",
    ),
    (RunState.WAITING, RunEvent.ALL_NODES_UNLINKED): (
        RunState.UNLINKED,
        "Warn the user. Bound the job by `timeout` and a minute more.",
    ),
    **{
        (state, RunEvent.RANKS_STARTED): (RunState.RUNNING, "Start the clock of `timeout`.")
        for state in (RunState.STARTING, RunState.UNLINKED)
    },
    (RunState.STOPPING, RunEvent.RANKS_STARTED): (
        RunState.STOPPING,
        "Start the clock of `timeout`: ranks that do not stop end by it.",
    ),
    **{
        (state, RunEvent.FAILURE_SETTLED): (
            RunState.STOPPING,
            "Ask the nodes to stop their ranks.",
        )
        for state in _WITH_RANKS
        if state is not RunState.STOPPING
    },
    **{
        (state, RunEvent.DEADLINE_PASSED): (
            RunState.COLLECTING_STACKS,
            "Ask the nodes for the stacks of their ranks.",
        )
        for state in _WITH_RANKS
    },
    **{
        (state, RunEvent.JOB_ENDED): (
            RunState.DRAINING,
            "Receive the messages that are on their way.",
        )
        for state in _BEFORE_ITS_END
    },
    **{
        (state, RunEvent.ERROR_RAISED): (
            RunState.ABORTING,
            "Ask the nodes to stop their ranks, receive the messages on their way, cancel the job.",
        )
        for state in (*_BEFORE_ITS_END, RunState.COLLECTING_STACKS, RunState.DRAINING)
    },
    **{
        (state, RunEvent.DRAINED): (RunState.ENDED, "Return the outcomes, or raise the error.")
        for state in (RunState.DRAINING, RunState.ABORTING)
    },
}
"""The next state, and what `RunMonitor` does, for each event that a state allows.

`StateMachine.fire` ignores all other events. They come too late: a rank starts while the others
are stopped, or the job ends while the driver raises an error.
"""


def run_state_machine() -> StateMachine[RunState]:
    """Return the state machine of an attempt that has just been submitted."""
    return StateMachine(TRANSITIONS, RunState.WAITING)
