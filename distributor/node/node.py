"""One node of a run: its agent and its link, and what passes between them.

A launcher calls `Node.run` where the ranks are to run: in a task of Spark, in a process of its own,
or on a thread of the driver.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import BinaryIO, NoReturn, Protocol

from distributor.core.addresses import host_name, joined
from distributor.core.states import StateMachine, Table
from distributor.core.text import printable
from distributor.core.threads import MessageQueue
from distributor.core.versions import Software
from distributor.errors import DistributorError, ExecutorNotReady, StartTimeout
from distributor.node.agent.agent import Agent
from distributor.node.agent.network import listen_for_ranks
from distributor.node.agent.worker_env import common_environment
from distributor.node.process import zygote
from distributor.node.process.specs import NodeShare
from distributor.node.process.supervisor import Interpreter, StartLimit
from distributor.node.process.zygote import ZygoteSpec
from distributor.policies import AFTER_COLLATERAL_SECONDS, DRIVER_FIRST_SECONDS
from distributor.serialization.outcome import Failure, Value
from distributor.wire import messages
from distributor.wire.node_link import NodeLink, NoLink

REACH_SECONDS = 10.0
"""Seconds to connect to rank 0's store."""
RELEASE_SECONDS = 30.0
"""Seconds for which rank 0 serves the store after its work if the link is lost."""
DEADLINE_SLACK = 15.0
"""Seconds past a deadline in which the driver may enforce it before a node with a link does."""


class NodeStopped(Exception):
    """The driver has ended the run, or is lost: this node has nothing to report."""


class RanksFailed(Exception):
    """Ranks of this node have failed, which the driver may not have learnt."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("; ".join(f"{failure.origin}: {failure.kind}" for failure in failures))
        self.failures = failures


def as_node_error(error: BaseException | None, host: str) -> DistributorError:
    """Return an error of a node as one that the driver can raise."""
    if isinstance(error, DistributorError):
        return error
    text = printable(f"{type(error).__name__}: {error}")
    return DistributorError(f"The node on {host} failed: {text}")


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


class Detour(Protocol):
    """What a launcher does for a node without a link."""

    def exchange(
        self,
        own: messages.Rendezvous | None,
        software: Software,
        warnings: Sequence[messages.NodeWarning],
        deadline: float,
    ) -> messages.Rendezvous:
        """Exchange the address of rank 0's store with all nodes.

        Parameters
        ----------
        own : Rendezvous or None
            The address, on the node that has rank 0.
        software : mapping of str to str
            This node's versions.
        warnings : sequence of NodeWarning
            What the user should know about this node.
        deadline : float
            When, by ``time.monotonic``, all nodes must have called this.
        """

    def write(self, rank: int, source: messages.Source, data: bytes) -> None:
        """Keep what a rank printed or reported."""

    def begin_last_barrier(self, then: Callable[[], object]) -> None:
        """Call a function once all nodes have called this."""


@dataclass(frozen=True)
class Provisions:
    """What a node has prepared for its ranks.

    Parameters
    ----------
    interpreter : Interpreter
        What the ranks run in.
    software : mapping of str to str
        Its versions.
    program : BinaryIO
        A file with the `Program` that each rank runs.
    data : BinaryIO or None
        A file with the node's part of the run's datasets.
    warnings : tuple of NodeWarning
        What the user should know about the node.
    """

    interpreter: Interpreter
    software: Software
    program: BinaryIO
    data: BinaryIO | None = None
    warnings: tuple[messages.NodeWarning, ...] = ()


class Node:
    """A node: reports what its agent observes, and acts on what the driver sends.

    Parameters
    ----------
    share : NodeShare
        The node's share of the run.
    detour : Detour, optional
        Replaces the link if there is none, or it is lost. By default a lost link ends the node.
    """

    def __init__(self, share: NodeShare, detour: Detour | None = None) -> None:
        self.share = share
        self._start_deadline = time.monotonic() + share.settings.start_timeout  # near the driver's
        self._states = StateMachine(TRANSITIONS, NodeState.STARTING, self)
        self.link: NodeLink = NoLink()
        self._detour = detour
        self._rendezvous: MessageQueue[messages.Rendezvous | None] = MessageQueue()
        self.took_detour = False
        self.is_stopped = False  # the driver has ended the run, or is lost
        self._expects_nothing = threading.Event()  # of the driver: stopped, or without a link
        self._agent: Agent | None = None
        self._early_notices: list[bool] = []
        self._lock = threading.RLock()  # of the main thread, the link and the lease

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Send an error of the node itself to the driver: the task that it would end is Spark's.

        Raises
        ------
        NodeStopped
            In place of an error that was sent.
        """
        is_own = isinstance(error, Exception) and not isinstance(error, NodeStopped | RanksFailed)
        if error is not None:
            self.fire(NodeEvent.ERROR_RAISED)
        if is_sent := is_own and not self.link.lost:
            self.link.send(messages.NodeFailed(as_node_error(error, self.share.host)))
        self.link.close()
        if is_sent:
            raise NodeStopped from None

    def open(self, link: NodeLink) -> None:
        """Use a link, whose functions are `receive`, `lose_link` and `lose_driver`."""
        self.link = link
        if link.lost:
            self.lose_link()
        self.fire(NodeEvent.CONNECTED)

    @property
    def state(self) -> NodeState:
        return self._states.state

    def fire(self, event: NodeEvent) -> bool:
        """Change the state as `TRANSITIONS` has it; return False if the state ignores the event."""
        with self._lock:
            return self._states.fire(event)

    @property
    def _head_start(self) -> float:
        """Seconds in which the driver may decide about a failure before the node does."""
        return 0.0 if self.link.lost else DRIVER_FIRST_SECONDS

    # From the first to the last moment

    def run(
        self, provisions: AbstractContextManager[Provisions], owner: int
    ) -> tuple[list[Value], Mapping[int, int]]:
        """Prepare, join the other nodes, run the ranks, and send their values over the link.

        Parameters
        ----------
        provisions : context manager
            Prepares what the ranks need.
        owner : int
            The process whose zygote the ranks are forked from, which ends with it.

        Returns
        -------
        values : list of Value
            The values that have not reached the driver.
        refused : mapping of int to int
            By the rank of those that the driver has refused, its free memory in bytes.

        Raises
        ------
        NodeStopped
            If the driver has ended the run. A rank's failure is one of the reasons.
        RanksFailed
            If ranks have failed, and this node has no link, or no answer, by which to end.
        StartTimeout, RunTimeout
            If a deadline passes.
        ExecutorNotReady
            If this node lacks something that its ranks need.
        """
        with provisions as prepared, contextlib.ExitStack() as until_end:
            self.fire(NodeEvent.ENVIRONMENT_READY)
            store_socket, own = None, None
            if self.share.node_rank == 0 or self.share.goes_on:
                store_socket = listen_for_ranks(self.share.address, self.share.rank_ports)
                until_end.enter_context(store_socket)
                own = messages.Rendezvous(self.share.address, store_socket.getsockname()[1])
            store = self.join(prepared, own)
            self.fire(NodeEvent.RENDEZVOUS_KNOWN)
            if own != store:
                check_reachable(store)
            env = {**prepared.interpreter.variables, **self.share.env}
            share = replace(self.share, master_addr=store.host, master_port=store.port, env=env)
            limit = StartLimit(self._start_deadline, self._check_not_ended)
            wanted = zygote_spec(share, prepared.interpreter, owner)
            with (
                zygote.open_spawner(wanted, limit, prepared.interpreter) as spawner,
                Agent(
                    share,
                    prepared.program,
                    spawner,
                    self,
                    store_socket=store_socket,
                    data=prepared.data,
                    head_start=self._head_start,
                ) as agent,
            ):
                self._attach(agent)
                # The driver may enforce a deadline before a node with a link does.
                slack = 0.0 if self.link.lost else DEADLINE_SLACK
                timeout = math.inf if share.settings.timeout is None else share.settings.timeout
                outcomes = agent.run(limit.deadline + slack, timeout + slack)
        values = [outcome for outcome in outcomes if isinstance(outcome, Value)]
        if not self.fire(NodeEvent.RANKS_ENDED):
            for value in values:
                value.file.close()
            self._end_with([outcome for outcome in outcomes if isinstance(outcome, Failure)])
        delivery = self.link.deliver(values)
        self.fire(NodeEvent.VALUES_DELIVERED)
        undelivered = [each for each in values if each.rank not in delivery.received]
        return [value for value in undelivered if value.size], delivery.refused

    def _end_with(self, failures: Sequence[Failure]) -> NoReturn:
        """End because ranks have failed, or were stopped: the driver ends the node by its link."""
        if self.link.lost:
            if failures and all(failure.collateral for failure in failures):
                time.sleep(AFTER_COLLATERAL_SECONDS)  # the node that has the cause may end this one
        else:
            self._expects_nothing.wait(self._head_start)
        self._check_not_ended()
        raise RanksFailed(failures)

    # Before the ranks

    def join(self, provisions: Provisions, own: messages.Rendezvous | None) -> messages.Rendezvous:
        """Report on this node; return where rank 0's store listens, as soon as that is known.

        Raises
        ------
        StartTimeout
            If the other nodes have not reported in time.
        NodeStopped
            If the driver has ended the run.
        ExecutorNotReady
            If the versions of the nodes differ.
        """
        software, warnings = provisions.software, provisions.warnings
        share = self.share
        self.link.send(messages.NodeUp(share.host, software, warnings, share.executor))
        if own:
            self.link.send(own)
        try:
            answer = self._rendezvous.get(self._start_deadline - time.monotonic())
        except queue.Empty:
            raise StartTimeout("The other nodes did not come up within start_timeout.") from None
        self._check_not_ended()
        if answer is not None:
            return answer
        if self._detour is None:
            raise NodeStopped
        self.took_detour = True
        self.link.close()
        self.link = NoLink()
        return self._detour.exchange(own, software, warnings, self._start_deadline)

    def _attach(self, agent: Agent) -> None:
        """Forward the driver's requests to this agent from now on, and those that came earlier."""
        with self._lock:
            self._agent = agent
            for here in self._early_notices:  # every rank has to count the same number
                agent.notify_preemption(here)
        if self.is_stopped:
            agent.stop()

    def _check_not_ended(self) -> None:
        """Raise `NodeStopped` if the driver has ended the run, or is lost."""
        if self.is_stopped:
            raise NodeStopped

    # What the agent observes

    def send(self, message: object) -> None:
        self.link.send(message)

    def on_rank_failed(self, failure: Failure) -> bool:
        """Report it; return whether the driver alone decides what follows."""
        is_survived = self.share.goes_on and not self.link.lost
        if not is_survived:
            self.fire(NodeEvent.RANK_FAILED)
        self.link.send(messages.Failed(failure))
        return is_survived

    def on_work_done(self) -> None:
        self.fire(NodeEvent.WORK_DONE)

    def write(self, rank: int, source: messages.Source, data: bytes) -> None:
        if not self.link.lost:
            self.link.send(messages.Output(rank, source, data))
        elif self._detour:
            self._detour.write(rank, source, data)

    def has_room(self) -> bool:
        return self.link.lost or self.link.has_room()

    # What the link reports, on any thread

    def receive(self, message: object) -> None:
        """Act on a message of the driver; one of an unknown type is ignored."""
        match message:
            case messages.Rendezvous():
                self._rendezvous.put(message)
            case messages.Unlink():
                self._rendezvous.put(None)
            case messages.Stop():
                self.fire(NodeEvent.STOP_RECEIVED)
            case messages.StackRequest() if self._agent:
                self._agent.request_stacks()
            case messages.StackRequest():
                self.link.send(messages.Stacks({}))
            case messages.Preempted():
                self._notify_preemption(here=self.share.host in message.hosts)
            case messages.MembersChanged() | messages.ReplaceRank() | messages.EndRank():
                if self._agent:
                    self._agent.change(message)
            case messages.Release():
                self._release()

    def lose_link(self) -> None:
        """Go on without the link, if that is possible."""
        if self._detour is None:
            self.lose_driver("The link to the driver is lost")
            return
        self._expect_nothing()
        if self.state is NodeState.SERVING and not self.took_detour:
            self._release_later()

    def lose_driver(self, reason: str) -> None:
        """End the run here, because the driver is gone."""
        if self.fire(NodeEvent.DRIVER_LOST):
            print(f"distributor: {reason}: this node stops its ranks.", file=sys.stderr)

    def stop_ranks(self) -> None:
        """Stop the ranks."""
        self.is_stopped = True
        self._expect_nothing()
        if self._agent:
            self._agent.stop()

    def kill_ranks(self) -> None:
        """Kill the ranks that are being stopped, without a grace period."""
        if self._agent:
            self._agent.kill()

    def _expect_nothing(self) -> None:
        self._expects_nothing.set()
        self._rendezvous.put(None)

    def _notify_preemption(self, here: bool) -> None:
        with self._lock:
            if self._agent:
                self._agent.notify_preemption(here)
            else:
                self._early_notices.append(here)

    def _release(self) -> None:
        if self._agent:
            self._agent.release()

    def _release_later(self) -> None:
        """Release rank 0 after a while: the driver can no longer report that all nodes are done."""
        timer = threading.Timer(RELEASE_SECONDS, self._release)
        timer.daemon = True
        timer.start()

    # What the node does in its states, as far as `run` does not

    def _prepare(self) -> None:
        """Report to the driver, if there is a link, and make the environment ready."""
        self.link.send(messages.Preparing(self.share.host))

    def _join(self) -> None:
        """Report versions and warnings, and wait for the address of rank 0's store."""

    def _start(self) -> None:
        """Check that the store can be reached, and start the ranks."""

    def _serve(self) -> None:
        """Report it, and release rank 0 once all nodes have done so.

        If the link is lost, that is 30 s later.
        """
        self.link.send(messages.NodeDone())
        if self.took_detour and self._detour:
            self._detour.begin_last_barrier(self._release)
        elif self.link.lost:
            self._release_later()

    def _deliver(self) -> None:
        """Send the values over the link, and the rest as the launcher does."""

    def _finish(self) -> None:
        """End."""

    def _report_failure(self) -> None:
        """Report it.

        The driver decides when the other ranks stop, or the node if there is no link.
        """

    def _fail(self) -> None:
        """Stop the ranks and raise the error."""

    def _stop_before(self) -> None:
        """Fail at the rendezvous, before ranks are started."""
        self.stop_ranks()


_BEFORE_RANKS = (NodeState.STARTING, NodeState.PREPARING, NodeState.RENDEZVOUS)
_WITH_RANKS = (NodeState.RUNNING, NodeState.SERVING)
_ENDS = (
    (NodeEvent.STOP_RECEIVED, NodeState.STOPPED),
    (NodeEvent.DRIVER_LOST, NodeState.LOST_DRIVER),
)

TRANSITIONS: Table[NodeState] = {
    (NodeState.STARTING, NodeEvent.CONNECTED): (NodeState.PREPARING, Node._prepare),
    (NodeState.PREPARING, NodeEvent.ENVIRONMENT_READY): (NodeState.RENDEZVOUS, Node._join),
    (NodeState.RENDEZVOUS, NodeEvent.RENDEZVOUS_KNOWN): (NodeState.RUNNING, Node._start),
    (NodeState.RUNNING, NodeEvent.WORK_DONE): (NodeState.SERVING, Node._serve),
    (NodeState.SERVING, NodeEvent.RANKS_ENDED): (NodeState.DELIVERING, Node._deliver),
    (NodeState.DELIVERING, NodeEvent.VALUES_DELIVERED): (NodeState.DONE, Node._finish),
    (NodeState.RUNNING, NodeEvent.RANK_FAILED): (NodeState.FAILED, Node._report_failure),
    **{
        (state, NodeEvent.ERROR_RAISED): (NodeState.FAILED, Node._fail)
        for state in (*_BEFORE_RANKS, *_WITH_RANKS, NodeState.DELIVERING)
    },
    **{
        (state, event): (next_state, Node._stop_before)
        for state in _BEFORE_RANKS
        for event, next_state in _ENDS
    },
    **{
        (state, event): (next_state, Node.stop_ranks)
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


def zygote_spec(share: NodeShare, interpreter: Interpreter, owner: int) -> ZygoteSpec | None:
    """Return the zygote that a node's ranks are forked from; None if they are not."""
    if not share.settings.warm:
        return None
    env = {**interpreter.variables, **share.env}
    return ZygoteSpec(
        owner=owner,
        environment=common_environment(share.ranks_per_node, env, os.environ),
        preload=share.settings.preload,
        interpreter=interpreter,
    )


def check_reachable(store: messages.Rendezvous) -> None:
    """Connect to rank 0's store, because torch would wait half an hour for one it cannot reach.

    Raises
    ------
    ExecutorNotReady
        If there is no connection within `REACH_SECONDS`.
    """
    try:
        socket.create_connection((store.host, store.port), REACH_SECONDS).close()
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            # Rank 0 may have ended already. Its own node then reports why, which ends this task.
            time.sleep(REACH_SECONDS)
        raise ExecutorNotReady(
            f"The executor on {host_name()} cannot reach rank 0's at "
            f"{joined(store.host, store.port)} ({error}). Ranks communicate over TCP: allow "
            "connections between the hosts of the executors, in both directions. rank_ports limits "
            "the port of rank 0's store, and net.ipv4.ip_local_port_range of the hosts limits the "
            "ports of gloo and NCCL."
        ) from error
