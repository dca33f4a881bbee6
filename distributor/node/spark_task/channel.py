"""How a node communicates with the driver and other nodes: over the link, or through Spark."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, Protocol

from distributor.core.versions import Software, check_alike
from distributor.errors import StartTimeout
from distributor.node.agent.agent import Agent
from distributor.node.agent.failure_grace import CAUSE_SECONDS, ECHO_SECONDS, START_SECONDS
from distributor.node.agent.log_files import LogFiles
from distributor.node.agent.sink import Sink
from distributor.node.spark_task.driver_lease import DriverLease
from distributor.node.spark_task.task_spec import TaskSpec
from distributor.serialization.outcome import Failure, Outcome, Value
from distributor.wire.link import Link
from distributor.wire.messages import (
    Failed,
    NodeDone,
    NodeUp,
    NodeWarning,
    Output,
    Preempted,
    Preparing,
    RanksStarted,
    Release,
    Rendezvous,
    RendezvousThroughSpark,
    Source,
    StackRequest,
    Stacks,
    Stop,
    Subscribed,
    ValuePart,
    ValueReceived,
    ValueRefused,
    ValueStart,
)
from distributor.wire.spark_error_payload import TaskFailed

CONNECT_SECONDS = 5.0
"""Seconds to reach the hub before a node goes on without it."""
LINGER_SECONDS = 30.0
"""Seconds that rank 0 serves the store after its work when the link was lost meanwhile."""
SEND_SECONDS = 60.0
"""Seconds without progress after which a value goes through Spark instead of the link."""
BACKLOG = 8 * 1024 * 1024
CANCELLED_SECONDS = 5.0
"""Seconds within which Spark ends the worker of a task that it has cancelled.

One that waits in ``allGather`` meanwhile takes its whole executor along (exit code 50, seen in
PySpark 4.3), and with it whatever else runs there. A driver that ended the run is a link that
cannot be had, so a node that finds none first waits to be ended.
"""
DRIVER_FIRST_SECONDS = 4.0
"""Seconds past a deadline that a node without a link gives a driver to which others have one.

The driver asks those where their ranks stand, which is no longer known once this node's task has
failed: Spark then ends all tasks.
"""
LATE_BYTES = 64 * 1024 * 1024
"""Bytes of what ranks tell that a node without a link keeps for the end; the rest is lost."""

NodeWarnings = tuple[NodeWarning, ...]
Answer = Rendezvous | RendezvousThroughSpark | None
"""What a node that waits to meet the others is told; None where the link or the run has ended."""


class Channel(Sink, Protocol):
    """A node's way to the others; also the sink for its ranks' output."""

    patience: float
    """Seconds that the driver has to decide on a failure before the node does."""
    deadline_slack: float
    """Seconds past a deadline that the driver has to enforce it before the node does."""
    refused: dict[int, int]
    """How much memory the driver has, by rank whose value takes more (bytes)."""

    @property
    def late(self) -> list[Output]:
        """What ranks told that no link could bring; the task's rows take it along."""

    @property
    def stopped(self) -> bool:
        """Whether the driver told this node to stop."""

    def __enter__(self) -> Channel: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def attach(self, agent: Agent) -> None:
        """Let the driver's words reach the agent."""

    def meet(
        self, mine: Rendezvous | None, software: Software, warnings: NodeWarnings
    ) -> Rendezvous:
        """Report on this node, and exchange where rank 0's store listens.

        Parameters
        ----------
        mine : Rendezvous or None
            Where it listens, if this is its node.
        software : mapping of str to str
            This node's versions.
        warnings : tuple of NodeWarning
            What the user should know of it.
        """

    def started(self) -> None:
        """Tell that this node's ranks begin their work."""

    def failed(self, failure: Failure) -> None:
        """Tell that a rank failed."""

    def stacks(self, stacks: dict[int, str]) -> None:
        """Tell where this node's ranks stand."""

    def subscribed(self) -> None:
        """Tell that a rank wants to be told when the run is about to lose a process."""

    def sigterm_received(self) -> None:
        """Tell that such a rank was asked to end."""

    def await_verdict(self, failures: list[Failure]) -> None:
        """Wait before the task is ended by a failure: that ends every other task too."""

    def done(self) -> None:
        """Tell that this node's ranks have done their work; see that rank 0 is released."""

    def deliver(self, outcomes: list[Outcome]) -> set[int]:
        """Hand over values; give the ranks whose values arrived."""


def open_channel(spec: TaskSpec, node_rank: int, host: str, context: Any) -> Channel:
    """Connect to the hub; where it cannot be had, give the channel through Spark alone."""
    through_spark = SparkChannel(spec, context)
    channel = HubChannel(spec, through_spark)
    try:
        channel.connect(node_rank, host)
    except OSError as error:
        print(f"distributor: no link to the driver at {spec.hub}: {error}", file=sys.stderr)
        return through_spark
    return channel


def hosts_of(context: Any) -> list[str]:
    """List the hosts of a barrier stage's tasks, in the order of the tasks."""
    return [info.address.rsplit(":", 1)[0] for info in context.getTaskInfos()]


class SparkChannel:
    """What Spark alone gives: an exchange at the start, a barrier at the end, rows.

    Output goes to the node's own ``log_dir``, where there is one, and is not shown.
    """

    patience = 0.0

    def __init__(self, spec: TaskSpec, context: Any) -> None:
        self.refused: dict[int, int] = {}
        self.deadline_slack = 0.0  # nobody else enforces it
        self._context = context
        self._agent: Agent | None = None
        self._files = LogFiles(spec.log_dir, spec.run_id, spec.attempt) if spec.log_dir else None
        self._last_barrier = threading.Thread(target=self._finish_together, daemon=True)
        self.late: list[Output] = []
        self._late_room = LATE_BYTES

    @property
    def stopped(self) -> bool:
        return False  # Spark stops a task by killing it

    def __enter__(self) -> SparkChannel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._files:
            self._files.close()

    def attach(self, agent: Agent) -> None:
        self._agent = agent

    def meet(
        self, mine: Rendezvous | None, software: Software, warnings: NodeWarnings
    ) -> Rendezvous:
        for warning in warnings:
            print(f"distributor: {warning.text} {warning.detail}", file=sys.stderr)
        time.sleep(CANCELLED_SECONDS)
        return self.meet_now(mine, software)

    def meet_now(
        self, mine: Rendezvous | None, software: Software, *, linked: bool = False
    ) -> Rendezvous:
        """Meet at once: the driver said so, so it has not cancelled this task."""
        ours = {
            "store": asdict(mine) if mine else None,
            "software": dict(software),
            "linked": linked,
        }
        said = [json.loads(text) for text in self._context.allGather(json.dumps(ours))]
        if any(words["linked"] for words in said):
            self.deadline_slack = DRIVER_FIRST_SECONDS
        by_host = zip(hosts_of(self._context), said, strict=True)
        check_alike({host: words["software"] for host, words in by_host})
        return next(Rendezvous(**words["store"]) for words in said if words["store"])

    def started(self) -> None:
        pass  # nobody waits for it

    def failed(self, failure: Failure) -> None:
        pass  # the exception that ends the task carries it

    def stacks(self, stacks: dict[int, str]) -> None:
        pass  # nobody could ask

    def subscribed(self) -> None:
        pass  # nobody could tell

    def sigterm_received(self) -> None:
        pass  # ranks of other nodes would not hear of it

    def await_verdict(self, failures: list[Failure]) -> None:
        if failures and all(failure.collateral for failure in failures):
            time.sleep(ECHO_SECONDS)  # unless the cause ends this task by then

    def done(self) -> None:
        self._last_barrier.start()

    def _finish_together(self) -> None:
        self._context.barrier()
        if self._agent:
            self._agent.release()

    def deliver(self, outcomes: list[Outcome]) -> set[int]:
        self._last_barrier.join()
        return set()  # the rows carry all

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if source == "stdout" or source == "stderr":
            if self._files:
                self._files.write(rank, source, data)
        elif self._late_room > 0:
            self._late_room -= len(data)
            self.late.append(Output(rank, source, data))

    def has_room(self) -> bool:
        return True


class HubChannel:
    """The link to the driver's hub, with the way through Spark for what the link cannot do."""

    patience = CAUSE_SECONDS + ECHO_SECONDS + START_SECONDS
    deadline_slack = 15.0

    def __init__(self, spec: TaskSpec, through_spark: SparkChannel) -> None:
        self._spec = spec
        self._through_spark = through_spark
        self._met_through_spark = False
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._changed = threading.Condition()
        self._received: set[int] = set()
        self.refused: dict[int, int] = {}
        self._done = self._stopped = False
        self._early_notices = 0
        self._agent: Agent | None = None
        self._link: Link
        self._host: str
        self._lease = DriverLease(spec.hub, self._expired)

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def late(self) -> list[Output]:
        return self._through_spark.late

    def __enter__(self) -> HubChannel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lease.close()
        self._link.close()
        self._through_spark.__exit__(*exc_info)

    def connect(self, node_rank: int, host: str) -> None:
        """Connect to the hub.

        Raises
        ------
        OSError
            Where it cannot be reached, or does not prove that it holds the run's secret.
        """
        self._link = Link.connect(
            *self._spec.hub,
            self._spec.secret,
            node_rank,
            timeout=CONNECT_SECONDS,
            on_message=self._receive,
            on_lost=self._lost,
        )
        self._lease.start()
        self._host = host
        self._link.send(Preparing(host))

    def attach(self, agent: Agent) -> None:
        self._through_spark.attach(agent)
        with self._changed:
            self._agent = agent
            for _ in range(self._early_notices):  # every rank has to count the same
                agent.give_notice()
        if self._stopped:
            agent.stop()

    def meet(
        self, mine: Rendezvous | None, software: Software, warnings: NodeWarnings
    ) -> Rendezvous:
        self._link.send(NodeUp(self._host, software, warnings))
        if mine:
            self._link.send(mine)
        try:
            answer = self._answers.get(timeout=self._spec.meet_timeout)
        except queue.Empty:
            raise StartTimeout("The other nodes did not come up within start_timeout.") from None
        if isinstance(answer, Rendezvous):
            return answer
        if self._stopped:
            raise TaskFailed.of([], self._spec.secret)
        self._met_through_spark = True
        if answer is None:
            return self._through_spark.meet(mine, software, warnings)
        return self._through_spark.meet_now(mine, software, linked=True)

    def started(self) -> None:
        self._link.send(RanksStarted())

    def failed(self, failure: Failure) -> None:
        self._link.send(Failed(failure))

    def stacks(self, stacks: dict[int, str]) -> None:
        self._link.send(Stacks(stacks))

    def subscribed(self) -> None:
        self._link.send(Subscribed())

    def sigterm_received(self) -> None:
        self._link.send(Preempted())

    def await_verdict(self, failures: list[Failure]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._link.lost, self.patience)

    def done(self) -> None:
        self._done = True
        if self._met_through_spark:
            self._through_spark.done()
        self._link.send(NodeDone())
        if self._link.lost:
            self._linger()

    def deliver(self, outcomes: list[Outcome]) -> set[int]:
        if self._met_through_spark:
            self._through_spark.deliver(outcomes)
        values = [outcome for outcome in outcomes if isinstance(outcome, Value)]
        sent = {value.rank for value in values if self._send(value)}
        with self._changed:
            self._changed.wait_for(
                lambda: self._link.lost or sent <= self._answered(), SEND_SECONDS
            )
            return sent & self._received

    def _answered(self) -> set[int]:
        return self._received | self.refused.keys()

    def _send(self, value: Value) -> bool:
        if not value.size:
            return False  # nobody asked for what this rank returned
        self._link.send(ValueStart(value.rank, value.size))
        for data in value.parts():
            if value.rank in self.refused or not self._link.wait_below(BACKLOG, SEND_SECONDS):
                return False
            self._link.send(ValuePart(value.rank, data))
        return True

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if self._link.lost:
            self._through_spark.write(rank, source, data)
        else:
            self._link.send(Output(rank, source, data))

    def has_room(self) -> bool:
        return self._link.lost or self._link.backlog() < BACKLOG

    def _receive(self, message: object) -> None:
        """Act on the driver's word; called on the link's thread."""
        self._lease.renew()
        if isinstance(message, (Rendezvous, RendezvousThroughSpark)):
            self._answers.put(message)
        elif isinstance(message, Stop):
            self._stop()
        elif isinstance(message, StackRequest):
            if self._agent:
                self._agent.ask_for_stacks()
        elif isinstance(message, Preempted):
            self._give_notice()
        elif isinstance(message, Release):
            self._release()
        elif isinstance(message, ValueReceived):
            with self._changed:
                self._received.add(message.rank)
                self._changed.notify_all()
        elif isinstance(message, ValueRefused):
            with self._changed:
                self.refused[message.rank] = message.room
                self._changed.notify_all()

    def _give_notice(self) -> None:
        with self._changed:
            if self._agent:
                self._agent.give_notice()
            else:
                self._early_notices += 1

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._answers.put(None)
        if self._agent:
            self._agent.stop()

    def _expired(self, reason: str) -> None:
        print(f"distributor: {reason}: this node stops its ranks.", file=sys.stderr)
        self._stop()

    def _lost(self) -> None:
        self._lease.link_lost()
        self._answers.put(None)
        with self._changed:
            self._changed.notify_all()
        if self._done:
            self._linger()

    def _linger(self) -> None:
        """Release rank 0 after a while: the driver can no longer tell when all are done."""
        timer = threading.Timer(LINGER_SECONDS, self._release)
        timer.daemon = True
        timer.start()

    def _release(self) -> None:
        if self._agent:
            self._agent.release()
