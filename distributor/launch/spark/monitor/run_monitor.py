"""The driver's view of one run on a cluster: what nodes report, and what follows from it."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from distributor.core.text import listed
from distributor.core.versions import Software, check_alike, pickling_software
from distributor.errors import NodeLost, RunTimeout, StartTimeout
from distributor.launch.console import notify, warn
from distributor.launch.job import CLUSTER_TRAINING, Job
from distributor.launch.one_time_warnings import warn_about_nodes
from distributor.launch.spark.error_translation import explain
from distributor.launch.spark.monitor.task_starts import TaskStarts
from distributor.launch.spark.monitor.value_receiver import ValueReceiver
from distributor.launch.spark.plan import ClusterPlan
from distributor.launch.spark.polling import Reminder
from distributor.node.agent.failure_grace import FailureGracePeriod
from distributor.node.agent.sink import Sink
from distributor.node.spark_task.task import LATE
from distributor.node.worker.stack_dump import with_stacks
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Failure, Outcome, Value
from distributor.wire.hub import HERE, LOST, SILENT, Hub
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
    StackRequest,
    Stacks,
    Stop,
    Subscribed,
    ValuePart,
    ValueStart,
)
from distributor.wire.protocol import LEASE_SECONDS
from distributor.wire.spark_error_payload import failures_in, timeout_in

TICK = 0.1
MEET_SECONDS = 10.0
"""Seconds from the first node's word to the last's, before they meet through Spark instead.

Longer than a node tries to connect. One that is only slow costs the others no more than a second.
"""
LOOK_SECONDS = 1.0
"""Seconds between two looks at which executors are about to end."""
UNHEARD_SECONDS = 15.0
"""Seconds from the start of all tasks after which nodes that have not reported have no link.

Their Python has to start, and then each tries to connect for a few seconds.
"""
STACKS_SECONDS = 3.0
"""Seconds for the nodes to report where their ranks stand."""
REPORT_SECONDS = 15.0
"""The same if some can do so through Spark alone, by failing at the deadline themselves."""
BACKSTOP_SECONDS = 60.0
"""Seconds that nodes without a link have to start their ranks, and to enforce ``timeout``.

They do that exactly; the driver, which does not hear when their ranks start, ends what they do not.
"""
LAST_WORDS_SECONDS = 5.0
"""Seconds for what nodes said over the link before their tasks ended."""


class RunMonitor:
    """Follows a run from its submission to its outcomes; a context manager.

    Parameters
    ----------
    job : Job
        What runs.
    plan : ClusterPlan
        On how many nodes.
    hub : Hub
        Where the nodes' words arrive.
    sink : Sink
        Where the ranks' output goes.
    start_deadline : float
        When, by ``time.monotonic``, all nodes must be up.
    leaving : callable
        Of hosts, or None for all: gives the executors there that are about to end.
    """

    def __init__(
        self,
        job: Job,
        plan: ClusterPlan,
        hub: Hub,
        sink: Sink,
        start_deadline: float,
        leaving: Callable[[set[str] | None], set[str]] = lambda hosts: set(),
    ) -> None:
        self._job = job
        self._plan = plan
        self._hub = hub
        self._sink = sink
        self._start_deadline = start_deadline
        self._run_deadline = math.inf
        self._ranks_up = False
        self._start_told = False
        self._tasks = TaskStarts(plan.num_tasks)
        self._reminder = Reminder()
        self._preparing: dict[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._software: dict[str, Software] = {}
        self._node_warnings: dict[str, list[NodeWarning]] = {}
        self._first_up = 0.0
        self._rendezvous: Rendezvous | None = None
        self._meeting: Literal["hub", "spark"] | None = None
        self._done: set[int] = set()
        self._linked: set[int] = set()
        self._vanished: list[int] = []
        self._failures: list[Failure] = []
        self._grace_period = FailureGracePeriod(plan.num_tasks)
        self._started: set[int] = set()
        self._stopped = False
        self._given_up: set[int] = set()
        self._stacks: dict[int, dict[int, str]] = {}  # by node, and there by rank
        self._leaving = leaving
        # Those of an earlier attempt, which got no task of this one, may still be there.
        self._told_of = leaving(None) if job.attempt else set()
        self._look_at = 0.0
        self._arrivals = ValueReceiver()
        self._ending: list[Any] | BaseException | None = None

    def __enter__(self) -> RunMonitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._arrivals.close()

    def job_ended(self, ending: list[Any] | BaseException) -> None:
        """Take the job's rows, or the exception that ended it. From any thread."""
        self._hub.post(ending)

    def outcomes(
        self, cancel: Callable[[], object], tasks: TaskStarts | None = None
    ) -> list[Outcome]:
        """Follow the run to its end.

        Parameters
        ----------
        cancel : callable
            Cancels the Spark job; called if the run is given up.
        tasks : TaskStarts, optional
            What Spark says of the job's tasks; by default it says nothing.

        Returns
        -------
        list of Outcome
            Of each rank that ended by itself, failures in the order in which they came.
        """
        self._tasks = tasks or self._tasks
        self._job.inquiry.ask = lambda: self._hub.post(StackRequest())
        self._job.preemption.through(lambda: self._hub.broadcast(Preempted()))
        try:
            while self._ending is None:
                self._take(TICK)
                self._sink.has_room()
                self._job.cancellation.check()
                self._advance()
            self._take_last_words()
        except BaseException as error:
            self._hub.broadcast(Stop("the driver gave the run up"))
            try:
                if isinstance(error, Exception):
                    self._take_last_words()  # they may tell why the run was cut short
            finally:
                cancel()
            raise
        return self._read(self._ending)

    # What the nodes tell

    def _take(self, seconds: float) -> bool:
        event = self._hub.get(seconds)
        if event is None:
            return False
        node, message = event
        if message is LOST:
            self._linked.discard(node)
            self._preparing.pop(node, None)
            if not self._stopped and node in self._hosts.keys() - self._done:
                self._vanished.append(node)
        elif message is SILENT:
            self._given_up.add(node)
        elif isinstance(message, (list, BaseException)):
            self._ending = message
        else:
            _HANDLERS[type(message)](self, node, message)
        return True

    def _node_prepares(self, node: int, message: Preparing) -> None:
        if not self._preparing:
            self._reminder = Reminder()
        self._preparing[node] = message.host

    def _node_up(self, node: int, message: NodeUp) -> None:
        self._preparing.pop(node, None)
        self._first_up = self._first_up or time.monotonic()
        self._hosts[node] = message.host
        self._software[f"{message.host} (node {node})"] = message.software
        self._node_warnings.setdefault(message.host, []).extend(message.warnings)
        self._linked.add(node)
        if self._meeting == "spark":
            warn_about_nodes({message.host: message.warnings})
            self._grace_period.expect(len(self._linked))
            self._hub.send(node, RendezvousThroughSpark())

    def _rendezvous_known(self, node: int, message: Rendezvous) -> None:
        self._rendezvous = message

    def _ranks_started(self, node: int, message: RanksStarted) -> None:
        self._grace_period.started(node)
        self._started.add(node)
        self._job.standing.come_up(self._plan.ranks_per_task)
        if self._meeting == "spark" and self._started >= self._linked and not self._ranks_up:
            self._warn_of_missing_links()  # not before: all nodes have met, so none is only slow
        if not self._late():
            self._note_start()
            self._start_the_clock()

    def _output(self, node: int, message: Output) -> None:
        self._sink.write(message.rank, message.source, message.data)

    def _value_start(self, node: int, message: ValueStart) -> None:
        if refusal := self._arrivals.start(message):
            self._hub.send(node, refusal)

    def _value_part(self, node: int, message: ValuePart) -> None:
        if receipt := self._arrivals.take(message):
            self._hub.send(node, receipt)

    def _failed(self, node: int, message: Failed) -> None:
        self._failures.append(message.failure)
        self._job.failures.append(message.failure)
        self._grace_period.failed(message.failure)

    def _ask_for_stacks(self, node: int, message: StackRequest) -> None:
        self._stacks = {}
        self._hub.broadcast(message)

    def _stacks_told(self, node: int, message: Stacks) -> None:
        self._stacks[node] = message.stacks
        if self._linked <= self._stacks.keys():
            self._job.inquiry.answer(self._all_stacks())

    def _heeds(self, node: int, message: Subscribed) -> None:
        self._job.preemption.subscribe()

    def _preempted(self, node: int, message: Preempted) -> None:
        self._hub.broadcast(message)

    def _node_done(self, node: int, message: NodeDone) -> None:
        self._done.add(node)
        if len(self._done) == self._plan.num_tasks:
            self._hub.broadcast(Release())

    # What follows from it

    def _advance(self) -> None:
        now = time.monotonic()
        if self._meeting is None:
            self._let_meet(now)
        elif now > self._start_deadline and (late := self._late()):
            self._give_up(
                StartTimeout, f"After start_timeout, still starting: {self._named(late)}."
            )
        if now > self._run_deadline:
            self._give_up(
                RunTimeout,
                f"The run took longer than its timeout of {self._job.settings.timeout:g} s. "
                f"Still busy: {self._named(set(self._hosts) - self._done) or 'no known node'}.",
            )
        if (lost := self._given_up & self._hosts.keys() - self._done) and not self._stopped:
            raise NodeLost(
                f"{self._named(lost)}: no sign of life for {LEASE_SECONDS:g} s. The host is cut "
                "off from this one, stopped or dead; its ranks stop by themselves as soon as they "
                "notice.",
                silent=tuple(self._hosts[node] for node in lost),
            )
        if (self._grace_period.over() or self._all_failed()) and not self._stopped:
            self._stopped = True
            self._hub.broadcast(Stop("a rank failed"))
        if self._job.preemption.subscribed and now > self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._tell_of_leaving()

    def _tell_of_leaving(self) -> None:
        """Tell the ranks of executors that Spark is about to end."""
        if new := self._leaving(set(self._hosts.values())) - self._told_of:
            self._told_of |= new
            notify(f"Spark is about to end {listed('executor', sorted(new))}: the ranks are told.")
            self._hub.broadcast(Preempted())

    def _all_failed(self) -> bool:
        """Tell whether nobody is left who could fail, too."""
        ranks = self._plan.num_tasks * self._plan.ranks_per_task
        return len({failure.origin.rank for failure in self._failures}) == ranks

    def _give_up(self, kind: type[RunTimeout] | type[StartTimeout], why: str) -> NoReturn:
        """Find out where the ranks stand, for as long as nodes may take to say so, and raise."""
        self._ask_for_stacks(HERE, StackRequest())
        asked = set(self._linked)
        unlinked = kind is RunTimeout and self._meeting == "spark" and bool(self._silent())
        deadline = time.monotonic() + (REPORT_SECONDS if unlinked else STACKS_SECONDS)
        while time.monotonic() < deadline and (
            asked & self._linked - self._stacks.keys() or (unlinked and self._ending is None)
        ):
            self._take(TICK)
        reported = timeout_in(str(self._ending), self._hub.secret)
        stacks = (reported.stacks if reported else {}) | self._all_stacks()
        raise kind(with_stacks(why, stacks), stacks=stacks)

    def _all_stacks(self) -> dict[int, str]:
        return {rank: text for told in self._stacks.values() for rank, text in told.items()}

    def _let_meet(self, now: float) -> None:
        """Let the nodes meet as soon as all are here; through Spark where one stays away."""
        if self._preparing and self._reminder.due():
            notify(f"Waiting: {self._unready()}.")
        if self._rendezvous and len(self._hosts) == self._plan.num_tasks:
            warn_about_nodes(self._node_warnings)
            check_alike(self._software | {"the driver": pickling_software()})
            self._hub.broadcast(self._rendezvous)
            self._meeting = "hub"
        elif self._hosts and not self._preparing and self._one_stays_away(now):
            self._hub.broadcast(RendezvousThroughSpark())
            self._go_without_hub()
        elif not self._hosts and not self._preparing:
            self._await_tasks(now)
        elif now > self._start_deadline:
            if self._preparing:
                raise StartTimeout(f"After start_timeout, {self._unready()}.")
            raise StartTimeout(
                f"After start_timeout, nothing was heard from {listed('task', self._silent())}."
            )

    def _await_tasks(self, now: float) -> None:
        """Find out from Spark whether nodes that have not reported run at all."""
        self._tasks.look()
        if self._tasks.all_started_for(UNHEARD_SECONDS):
            self._go_without_hub()
        elif now > self._start_deadline and self._tasks.unknown:
            self._go_without_hub()  # they may well run, and their work would be lost
        elif now > self._start_deadline and self._tasks.lacking:
            raise StartTimeout(f"After start_timeout, {self._tasks.shortfall()}")
        elif self._tasks.message_due():
            notify(f"Waiting: {self._tasks.shortfall()}")

    def _unready(self) -> str:
        return f"the environment is not ready on {', '.join(sorted(set(self._preparing.values())))}"

    def _one_stays_away(self, now: float) -> bool:
        return len(self._linked) < len(self._hosts) or now > self._first_up + MEET_SECONDS

    def _go_without_hub(self) -> None:
        """Let the nodes meet through Spark; those without a link cannot report their start."""
        self._meeting = "spark"
        warn_about_nodes(self._node_warnings)
        self._grace_period.expect(len(self._linked))
        if self._linked:
            return
        self._warn_of_missing_links()
        if self._tasks.all_started:
            self._note_start()
        if self._job.settings.timeout is not None:
            start_by = self._start_deadline if self._job.settings.environment else 0.0
            started = max(time.monotonic(), start_by)
            self._run_deadline = started + self._job.settings.timeout + BACKSTOP_SECONDS

    def _start_the_clock(self) -> None:
        if self._job.settings.timeout is not None and not self._ranks_up:
            self._run_deadline = time.monotonic() + self._job.settings.timeout
        self._ranks_up = True

    def _note_start(self) -> None:
        if not self._start_told:
            self._start_told = True
            notify(f"Started {CLUSTER_TRAINING.format(self._job.num_processes)}")

    def _late(self) -> set[int]:
        """Return the nodes that can report that their ranks have started, and have not."""
        expected = self._linked if self._meeting == "spark" else range(self._plan.num_tasks)
        return set(expected) - self._started

    def _silent(self) -> list[int]:
        return sorted(set(range(self._plan.num_tasks)) - set(self._hosts))

    def _named(self, nodes: set[int]) -> str:
        return ", ".join(f"{self._ranks_of(n)} on {self._hosts[n]}" for n in sorted(nodes))

    def _ranks_of(self, node: int) -> str:
        count = self._plan.ranks_per_task
        first = node * count
        return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"

    def _warn_if_unheard(self) -> None:
        if not self._hosts and self._meeting is None:
            self._warn_of_missing_links()

    def _warn_of_missing_links(self) -> None:
        if not (silent := self._silent()):
            return
        warn(
            f"{listed('Node', silent)} did not reach this process at port {self._hub.port}: their "
            "output is not shown here, and values come through Spark. Open that way, or set "
            "hub_address to one that the executors can reach."
        )

    # The end

    def _take_last_words(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._linked and time.monotonic() < deadline:
            self._take(TICK)
        while self._take(0):
            pass

    def _read(self, ending: list[Any] | BaseException) -> list[Outcome]:
        if isinstance(ending, BaseException):
            told = {failure.origin.rank for failure in self._failures}
            late = failures_in(str(ending), self._hub.secret)
            failures = [*self._failures, *(f for f in late if f.origin.rank not in told)]
            if all(failure.collateral for failure in failures):
                self._look_for_the_cause(ending, failures)
            self._warn_if_unheard()
            return [*failures, *self._arrivals.values.values()]
        self._warn_if_unheard()
        self._note_start()  # a short run without a link may end before that is known
        for message in _late_in(ending):
            self._output(HERE, message)
        return [*self._failures, *(_values_in(ending) | self._arrivals.values).values()]

    def _look_for_the_cause(self, ending: BaseException, echoes: list[Failure]) -> None:
        """Raise what Spark knows of a run whose ranks reported nothing but lost connections."""
        if timed_out := timeout_in(str(ending), self._hub.secret):
            raise timed_out from ending
        vanished = self._named(set(self._vanished[:1]))
        explained = explain(ending, self._plan.num_tasks, vanished)
        if not echoes or isinstance(explained, NodeLost):
            raise explained from ending


_HANDLERS: dict[type, Callable[[RunMonitor, int, Any], None]] = {
    Preparing: RunMonitor._node_prepares,
    NodeUp: RunMonitor._node_up,
    Rendezvous: RunMonitor._rendezvous_known,
    RanksStarted: RunMonitor._ranks_started,
    Output: RunMonitor._output,
    ValueStart: RunMonitor._value_start,
    ValuePart: RunMonitor._value_part,
    Failed: RunMonitor._failed,
    Stacks: RunMonitor._stacks_told,
    StackRequest: RunMonitor._ask_for_stacks,
    NodeDone: RunMonitor._node_done,
    Subscribed: RunMonitor._heeds,
    Preempted: RunMonitor._preempted,
}


def _late_in(rows: list[Any]) -> list[Output]:
    """Give what ranks told that no link could bring."""
    late = [pickle.loads(row.data) for row in rows if row.part == LATE]
    return [message for messages in late for message in messages]


def _values_in(rows: list[Any]) -> dict[int, Value]:
    """Put the values together that came as rows."""
    values: dict[int, Value] = {}
    parts = (row for row in rows if row.part != LATE)
    for row in sorted(parts, key=lambda row: (row.rank, row.part)):
        if row.rank not in values:
            values[row.rank] = Value(row.rank, anonymous_file())
        values[row.rank].file.write(row.data)
    return values
