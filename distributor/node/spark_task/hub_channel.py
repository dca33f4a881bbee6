"""Communication over the link to the driver's hub; through Spark for what the link cannot do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from distributor.core.versions import Software
from distributor.node.agent.agent import Agent
from distributor.node.agent.failure_grace import (
    AFTER_CAUSE_SECONDS,
    AFTER_COLLATERAL_SECONDS,
    LATE_START_SECONDS,
)
from distributor.node.spark_task.channel import Delivery
from distributor.node.spark_task.driver_lease import DriverLease
from distributor.node.spark_task.node_state import NodeEvent, NodeLifecycle, NodeState
from distributor.node.spark_task.rendezvous import HubAnswer, T
from distributor.node.spark_task.result_rows import UnsentReports
from distributor.node.spark_task.spark_channel import SparkChannel
from distributor.node.spark_task.task_spec import TaskSpec
from distributor.node.spark_task.value_delivery import MAX_BACKLOG, ValueDelivery
from distributor.serialization.outcome import Failure, Value
from distributor.wire.link import Link
from distributor.wire.messages import (
    Failed,
    Idle,
    NodeDone,
    NodeUp,
    NodeWarning,
    Output,
    Preempted,
    Preparing,
    ProgramRelay,
    ProgramSource,
    ProgramStored,
    ProgramWanted,
    RanksStarted,
    Release,
    Rendezvous,
    RendezvousThroughSpark,
    Source,
    StackRequest,
    Stacks,
    Stop,
    Subscribed,
    ValueReceived,
    ValueRefused,
)
from distributor.wire.spark_error_payload import TaskFailed

CONNECT_SECONDS = 5.0
"""Seconds to connect to the hub, after which a node goes on without a link."""
HANDSHAKE_SECONDS = 20.0
"""Seconds for the hub's answer, which a driver whose interpreter is busy gives late."""
RELEASE_SECONDS = 30.0
"""Seconds for which rank 0 serves the store after its work if the link is lost."""


class HubChannel:
    """The channel of a node that has a link to the driver.

    If the link is lost later, the run goes on through Spark; see `NodeState`.

    Parameters
    ----------
    spec : TaskSpec
        What the driver passed to the task.
    spark_channel : SparkChannel
        The channel for what the link cannot do.
    lifecycle : NodeLifecycle
        The state of the node.
    """

    head_start = AFTER_CAUSE_SECONDS + AFTER_COLLATERAL_SECONDS + LATE_START_SECONDS
    deadline_slack = 15.0

    def __init__(
        self, spec: TaskSpec, spark_channel: SparkChannel, lifecycle: NodeLifecycle
    ) -> None:
        self._spec = spec
        self._spark_channel = spark_channel
        self._lifecycle = lifecycle
        self._rendezvous: HubAnswer[Rendezvous | RendezvousThroughSpark] = HubAnswer(
            "The other nodes did not come up within start_timeout."
        )
        self._program: HubAnswer[ProgramSource | ProgramStored] = HubAnswer(
            "Neither the driver nor another node could send the program within start_timeout."
        )
        self._exchanged_through_spark = False
        self._delivery = ValueDelivery()
        self._agent: Agent | None = None
        self._early_notices: list[bool] = []
        self._fails_task = True
        self._lock = threading.Lock()
        self._link: Link
        self._host: str
        self._lease = DriverLease(spec.hub, spec.secret, self._handle_lease_expired)

    @property
    def unsent_reports(self) -> UnsentReports:
        return self._spark_channel.unsent_reports

    def __enter__(self) -> HubChannel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lease.close()
        self._link.close()
        self._spark_channel.__exit__(*exc_info)

    def connect(self, node_rank: int, host: str) -> None:
        """Connect to the hub.

        Raises
        ------
        OSError
            If the hub cannot be reached, or does not prove that it holds the run's secret.
        """
        self._host = host
        self._link = Link.connect(
            *self._spec.hub,
            self._spec.secret,
            node_rank,
            timeout=CONNECT_SECONDS,
            handshake_timeout=HANDSHAKE_SECONDS,
            on_message=self._receive,
            on_lost=self._handle_link_lost,
        )
        self._lease.start()
        self._link.send(Preparing(host))

    def attach(self, agent: Agent) -> None:
        self._spark_channel.attach(agent)
        with self._lock:
            self._agent = agent
            for here in self._early_notices:  # every rank has to count the same number
                agent.notify_preemption(here)
        if self._lifecycle.is_ended_by_driver:
            agent.stop()

    def exchange_rendezvous(
        self, own: Rendezvous | None, software: Software, warnings: Sequence[NodeWarning]
    ) -> Rendezvous:
        self._link.send(NodeUp(self._host, software, tuple(warnings)))
        if own:
            self._link.send(own)
        answer = self._wait_for(self._rendezvous)
        if isinstance(answer, Rendezvous):
            return answer
        self._exchanged_through_spark = True
        if answer is None:  # the link is lost
            return self._spark_channel.exchange_rendezvous(own, software, warnings)
        return self._spark_channel.exchange_now(own, software, has_link=True)

    def find_program(self, wanted: ProgramWanted) -> ProgramSource | ProgramStored | None:
        self._link.send(wanted)
        return self._wait_for(self._program)

    def send(self, message: ProgramRelay | ProgramStored) -> None:
        self._link.send(message)

    def await_verdict(self, failures: Sequence[Failure]) -> bool:
        self._lifecycle.wait_for(
            lambda: self._lifecycle.is_ended_by_driver or self._link.lost, self.head_start
        )
        return self._fails_task

    def deliver(self, values: Sequence[Value]) -> Delivery:
        if self._exchanged_through_spark:
            self._spark_channel.deliver(values)
        return self._delivery.deliver(values, self._link)

    def _wait_for(self, answer: HubAnswer[T]) -> T | None:
        found = answer.wait(self._spec.rendezvous_timeout)
        if self._lifecycle.is_ended_by_driver:
            raise TaskFailed.of([], self._spec.secret)
        return found

    # What the agent reports

    def on_ranks_started(self) -> None:
        self._link.send(RanksStarted())

    def on_rank_failed(self, failure: Failure) -> None:
        self._lifecycle.fire(NodeEvent.RANK_FAILED)
        self._link.send(Failed(failure))

    def on_idle(self, seconds: float) -> None:
        self._link.send(Idle(seconds))

    def on_stacks(self, stacks: dict[int, str]) -> None:
        self._link.send(Stacks(stacks))

    def on_work_done(self) -> None:
        self._lifecycle.fire(NodeEvent.WORK_DONE)
        if self._exchanged_through_spark:
            self._spark_channel.start_last_barrier()
        self._link.send(NodeDone())
        if self._link.lost:
            self._release_later()

    def on_preemption_subscribed(self) -> None:
        self._link.send(Subscribed())

    def on_sigterm(self) -> None:
        self._link.send(Preempted())

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if self._link.lost:
            self._spark_channel.write(rank, source, data)
        else:
            self._link.send(Output(rank, source, data))

    def has_room(self) -> bool:
        return self._link.lost or self._link.backlog() < MAX_BACKLOG

    # What the driver sends, on the link's thread

    def _receive(self, message: object) -> None:
        self._lease.renew()
        if handler := _HANDLERS.get(type(message)):
            handler(self, message)

    def _handle_stop(self, message: Stop) -> None:
        self._fails_task = message.fails_task
        if self._lifecycle.fire(NodeEvent.STOP_RECEIVED):
            self._end_run()

    def _handle_stacks_request(self, message: StackRequest) -> None:
        if self._agent:
            self._agent.request_stacks()

    def _handle_preemption(self, message: Preempted) -> None:
        here = self._host in message.hosts
        with self._lock:
            if self._agent:
                self._agent.notify_preemption(here)
            else:
                self._early_notices.append(here)

    def _handle_release(self, message: Release | None = None) -> None:
        if self._agent:
            self._agent.release()

    def _handle_value_received(self, message: ValueReceived) -> None:
        self._delivery.note_received(message)

    def _handle_value_refused(self, message: ValueRefused) -> None:
        self._delivery.note_refused(message)

    # The loss of the link, and of the driver

    def _handle_link_lost(self) -> None:
        self._lease.link_lost()
        self._stop_waiting()
        self._delivery.note_link_lost()
        self._lifecycle.notify()
        if self._lifecycle.state is NodeState.SERVING:
            self._release_later()

    def _handle_lease_expired(self, reason: str) -> None:
        if self._lifecycle.fire(NodeEvent.LEASE_EXPIRED):
            print(f"distributor: {reason}: this node stops its ranks.", file=sys.stderr)
            self._end_run()

    def _stop_waiting(self) -> None:
        self._rendezvous.give_up()
        self._program.give_up()

    def _end_run(self) -> None:
        self._stop_waiting()
        if self._agent:
            self._agent.stop()

    def _release_later(self) -> None:
        """Release rank 0 after a while: the driver can no longer report that all nodes are done."""
        timer = threading.Timer(RELEASE_SECONDS, self._handle_release)
        timer.daemon = True
        timer.start()


_HANDLERS: dict[type, Callable[[HubChannel, Any], None]] = {
    Rendezvous: lambda channel, message: channel._rendezvous.answer(message),
    RendezvousThroughSpark: lambda channel, message: channel._rendezvous.answer(message),
    ProgramSource: lambda channel, message: channel._program.answer(message),
    ProgramStored: lambda channel, message: channel._program.answer(message),
    Stop: HubChannel._handle_stop,
    StackRequest: HubChannel._handle_stacks_request,
    Preempted: HubChannel._handle_preemption,
    Release: HubChannel._handle_release,
    ValueReceived: HubChannel._handle_value_received,
    ValueRefused: HubChannel._handle_value_refused,
}
