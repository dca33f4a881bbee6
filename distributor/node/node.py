"""One node of a run: its agent and its link, and what passes between them.

A launcher calls `Node.run` where the ranks are to run: in a task of Spark, in a process of its own,
or on a thread of the driver.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, BinaryIO, Generic, NoReturn, Protocol, TypeVar

from distributor.core.addresses import host_name, joined
from distributor.core.text import printable
from distributor.core.versions import Software
from distributor.errors import DistributorError, ExecutorNotReady, StartTimeout
from distributor.node.agent.agent import Agent
from distributor.node.agent.network import listen_for_ranks
from distributor.node.agent.worker_env import common_environment
from distributor.node.lifecycle import NodeEvent, NodeLifecycle, NodeState
from distributor.node.process import zygote
from distributor.node.process.spawner import Interpreter, StartLimit
from distributor.node.process.specs import NodeShare
from distributor.node.process.zygote import ZygoteSpec
from distributor.policies import AFTER_COLLATERAL_SECONDS, DRIVER_FIRST_SECONDS
from distributor.serialization.outcome import Failure, Value
from distributor.wire.messages import (
    Failed,
    Idle,
    NodeDone,
    NodeFailed,
    NodeUp,
    NodeWarning,
    Output,
    Preempted,
    Preparing,
    RanksStarted,
    Release,
    Rendezvous,
    Source,
    StackRequest,
    Stacks,
    Stop,
    Subscribed,
    Unlink,
)
from distributor.wire.node_link import NodeLink, NoLink

REACH_SECONDS = 10.0
"""Seconds to connect to rank 0's store."""
RELEASE_SECONDS = 30.0
"""Seconds for which rank 0 serves the store after its work if the link is lost."""
DEADLINE_SLACK = 15.0
"""Seconds past a deadline in which the driver may enforce it before a node with a link does."""

T = TypeVar("T")


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


class Answer(Generic[T]):
    """An answer of the driver that a node waits for.

    Parameters
    ----------
    otherwise : str
        What to report if it does not come in time.
    """

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise
        self._answers: queue.Queue[T | None] = queue.Queue()

    def set(self, message: T | None) -> None:
        """Receive the answer; None if none can come any more. From any thread."""
        self._answers.put(message)

    def wait(self, timeout: float) -> T | None:
        try:
            return self._answers.get(timeout=min(max(timeout, 0), threading.TIMEOUT_MAX))
        except queue.Empty:
            raise StartTimeout(self._otherwise) from None


class Detour(Protocol):
    """What a launcher does for a node without a link."""

    def exchange(
        self,
        own: Rendezvous | None,
        software: Software,
        warnings: Sequence[NodeWarning],
        deadline: float,
    ) -> Rendezvous:
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

    def write(self, rank: int, source: Source, data: bytes) -> None:
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
    warnings: tuple[NodeWarning, ...] = ()


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
        self.lifecycle = NodeLifecycle(self)
        self.link: NodeLink = NoLink()
        self._detour = detour
        self._rendezvous: Answer[Rendezvous] = Answer(
            "The other nodes did not come up within start_timeout."
        )
        self.took_detour = False
        self._is_stopped = False
        self._agent: Agent | None = None
        self._early_notices: list[bool] = []
        self._lock = threading.Lock()

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
            self.lifecycle.fire(NodeEvent.ERROR_RAISED)
        if is_sent := is_own and not self.link.lost:
            self.link.send(NodeFailed(as_node_error(error, self.share.host)))
        self.link.close()
        if is_sent:
            raise NodeStopped from None

    def open(self, link: NodeLink) -> None:
        """Use a link, whose functions are `receive`, `lose_link` and `lose_driver`."""
        self.link = link
        if link.lost:
            self.lose_link()
        self.lifecycle.fire(NodeEvent.CONNECTED)

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
            self.lifecycle.fire(NodeEvent.ENVIRONMENT_READY)
            store_socket, own = None, None
            if self.share.node_rank == 0:
                store_socket = listen_for_ranks(self.share.address, self.share.rank_ports)
                until_end.enter_context(store_socket)
                own = Rendezvous(self.share.address, store_socket.getsockname()[1])
            store = self.join(prepared, own)
            self.lifecycle.fire(NodeEvent.RENDEZVOUS_KNOWN)
            if own is None:
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
        if not self.lifecycle.fire(NodeEvent.RANKS_ENDED):
            for value in values:
                value.file.close()
            self._end_with([outcome for outcome in outcomes if isinstance(outcome, Failure)])
        delivery = self.link.deliver(values)
        self.lifecycle.fire(NodeEvent.VALUES_DELIVERED)
        undelivered = [each for each in values if each.rank not in delivery.received]
        return [value for value in undelivered if value.size], delivery.refused

    def _end_with(self, failures: Sequence[Failure]) -> NoReturn:
        """End because ranks have failed, or were stopped: the driver ends the node by its link."""
        if self.link.lost:
            if failures and all(failure.collateral for failure in failures):
                time.sleep(AFTER_COLLATERAL_SECONDS)  # the node that has the cause may end this one
        else:
            self.lifecycle.wait_for(lambda: self._is_stopped or self.link.lost, self._head_start)
        self._check_not_ended()
        raise RanksFailed(failures)

    # Before the ranks

    def report_preparing(self) -> None:
        self.link.send(Preparing(self.share.host))

    def join(self, provisions: Provisions, own: Rendezvous | None) -> Rendezvous:
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
        self.link.send(NodeUp(self.share.host, software, warnings))
        if own:
            self.link.send(own)
        answer = self._wait_for(self._rendezvous)
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
        if self.lifecycle.is_ended_by_driver:
            agent.stop()

    def _check_not_ended(self) -> None:
        """Raise `NodeStopped` if the driver has ended the run, or is lost."""
        if self._is_stopped:
            raise NodeStopped

    def _wait_for(self, answer: Answer[T]) -> T | None:
        found = answer.wait(self._start_deadline - time.monotonic())
        self._check_not_ended()
        return found

    # What the agent observes

    def on_ranks_started(self) -> None:
        self.link.send(RanksStarted())

    def on_rank_failed(self, failure: Failure) -> None:
        self.lifecycle.fire(NodeEvent.RANK_FAILED)
        self.link.send(Failed(failure))

    def on_idle(self, seconds: float) -> None:
        self.link.send(Idle(seconds))

    def on_stacks(self, stacks: dict[int, str]) -> None:
        self.link.send(Stacks(stacks))

    def on_work_done(self) -> None:
        self.lifecycle.fire(NodeEvent.WORK_DONE)

    def report_work_done(self) -> None:
        self.link.send(NodeDone())
        if self.took_detour and self._detour:
            self._detour.begin_last_barrier(self._release)
        elif self.link.lost:
            self._release_later()

    def on_preemption_subscribed(self) -> None:
        self.link.send(Subscribed())

    def on_sigterm(self) -> None:
        self.link.send(Preempted())

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if not self.link.lost:
            self.link.send(Output(rank, source, data))
        elif self._detour:
            self._detour.write(rank, source, data)

    def has_room(self) -> bool:
        return self.link.lost or self.link.has_room()

    # What the link reports, on any thread

    def receive(self, message: object) -> None:
        """Act on a message of the driver; one of an unknown type is ignored."""
        if handler := _HANDLERS.get(type(message)):
            handler(self, message)

    def lose_link(self) -> None:
        """Go on without the link, if that is possible."""
        if self._detour is None:
            self.lose_driver("The link to the driver is lost")
            return
        self._stop_waiting()
        self.lifecycle.notify()
        if self.lifecycle.state is NodeState.SERVING and not self.took_detour:
            self._release_later()

    def lose_driver(self, reason: str) -> None:
        """End the run here, because the driver is gone."""
        if self.lifecycle.fire(NodeEvent.DRIVER_LOST):
            print(f"distributor: {reason}: this node stops its ranks.", file=sys.stderr)

    def stop_ranks(self) -> None:
        self._is_stopped = True
        self.lifecycle.notify()
        self._stop_waiting()
        if self._agent:
            self._agent.stop()

    def kill_ranks(self) -> None:
        """Kill the ranks that are being stopped, without a grace period."""
        if self._agent:
            self._agent.kill()

    def _on_stop(self, message: Stop) -> None:
        self.lifecycle.fire(NodeEvent.STOP_RECEIVED)

    def _on_stack_request(self, message: StackRequest) -> None:
        if self._agent:
            self._agent.request_stacks()
        else:
            self.link.send(Stacks({}))

    def _on_preempted(self, message: Preempted) -> None:
        here = self.share.host in message.hosts
        with self._lock:
            if self._agent:
                self._agent.notify_preemption(here)
            else:
                self._early_notices.append(here)

    def _on_release(self, message: Release) -> None:
        self._release()

    def _release(self) -> None:
        if self._agent:
            self._agent.release()

    def _release_later(self) -> None:
        """Release rank 0 after a while: the driver can no longer report that all nodes are done."""
        timer = threading.Timer(RELEASE_SECONDS, self._release)
        timer.daemon = True
        timer.start()

    def _stop_waiting(self) -> None:
        self._rendezvous.set(None)


_HANDLERS: dict[type, Callable[[Node, Any], None]] = {
    Rendezvous: lambda node, message: node._rendezvous.set(message),
    Unlink: lambda node, message: node._rendezvous.set(None),
    Stop: Node._on_stop,
    StackRequest: Node._on_stack_request,
    Preempted: Node._on_preempted,
    Release: Node._on_release,
}


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


def check_reachable(store: Rendezvous) -> None:
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
