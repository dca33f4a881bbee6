"""Follows an attempt on a cluster: receives what nodes report, and acts on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distributor.core.text import listed
from distributor.core.versions import check_alike, pickling_software
from distributor.errors import NodeLost, RunTimeout
from distributor.launch.job import Job
from distributor.launch.one_time_warnings import warn_about_nodes
from distributor.launch.output.messages import notify
from distributor.launch.spark.monitor import deadlines
from distributor.launch.spark.monitor.attempt import Attempt
from distributor.launch.spark.monitor.decommissioning import DecommissioningWatch, LeavingExecutors
from distributor.launch.spark.monitor.message_handlers import JobEnded, handle
from distributor.launch.spark.monitor.outcomes import late_output_in
from distributor.launch.spark.monitor.run_state import RunEvent, RunState
from distributor.launch.spark.monitor.task_starts import TaskStarts
from distributor.launch.spark.plan import ClusterPlan
from distributor.node.agent.output.sink import Sink
from distributor.node.worker.stacks import append_stacks
from distributor.serialization.outcome import Outcome
from distributor.wire import messages
from distributor.wire.hub import HERE, Hub
from distributor.wire.protocol import NODE_LEASE_SECONDS

TICK = 0.1
DRAIN_SECONDS = 5.0
"""Seconds for messages that nodes sent over the link before their tasks ended."""


class RunMonitor:
    """Follows an attempt from its submission to its outcomes; a context manager.

    `TRANSITIONS` in `run_state` has the states of an attempt and what is done in each.

    Parameters
    ----------
    job : Job
        The run.
    plan : ClusterPlan
        How many nodes it has, and how many ranks each.
    hub : Hub
        Receives the nodes' messages.
    sink : Sink
        Receives the ranks' output.
    start_deadline : float
        When, by ``time.monotonic``, the ranks of all nodes must have started.
    leaving_executors : callable, optional
        Returns the executors that are about to end, with their hosts, on these hosts or (None) on
        any. By default there are none.
    """

    def __init__(
        self,
        job: Job,
        plan: ClusterPlan,
        hub: Hub,
        sink: Sink,
        start_deadline: float,
        leaving_executors: LeavingExecutors = lambda hosts: {},
    ) -> None:
        self._attempt = Attempt(job, plan, hub, sink, start_deadline)
        self._tasks = TaskStarts(plan.num_tasks)
        self._decommissioning = DecommissioningWatch(leaving_executors, job.attempt)

    def __enter__(self) -> RunMonitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._attempt.outcomes.receiver.close()

    @property
    def state(self) -> RunState:
        """How far the attempt is."""
        return self._attempt.machine.state

    def job_ended(self, ending: list[Any] | BaseException) -> None:
        """Take the job's rows, or the exception that ended it. From any thread."""
        self._attempt.hub.post(JobEnded(ending))

    def follow(
        self, cancel: Callable[[], object], tasks: TaskStarts | None = None
    ) -> list[Outcome]:
        """Follow the attempt to its end.

        Parameters
        ----------
        cancel : callable
            Cancels the Spark job; called if an error is raised before the job has ended.
        tasks : TaskStarts, optional
            What Spark reports of the job's tasks; by default it reports nothing.

        Returns
        -------
        list of Outcome
            The outcome of each rank that ended by itself, failures in the order in which they
            were received.

        Raises
        ------
        StartTimeout, RunTimeout, RunStalled
            If a deadline has passed, or all ranks have been idle for ``stall_timeout``.
        NodeLost
            If a node no longer answers, or Spark lost its executor.
        ExecutorNotReady
            If the nodes' versions differ.
        RunCancelled
            If the run was cancelled.
        DistributorError
            If Spark ended the job and no rank reported a cause.
        """
        attempt = self._attempt
        self._tasks = tasks or self._tasks
        attempt.job.stack_requests.send = lambda: attempt.hub.post(messages.StackRequest())
        attempt.job.graceful_shutdown.start_attempt(
            lambda: attempt.hub.broadcast(messages.Preempted(tuple(attempt.nodes.hosts.values())))
        )
        try:
            while attempt.ending is None:
                self._receive(TICK)
                attempt.sink.has_room()
                attempt.job.cancellation.check()
                self._advance()
                if attempt.deadlines.is_stop_overdue():
                    cancel()  # the job then ends with an error, beside the failures
            if isinstance(attempt.ending, BaseException):
                # Spark kills the workers of the other tasks, but only after two seconds.
                attempt.nodes.stop()
                attempt.hub.broadcast(messages.Stop("the Spark job has failed"))
            self._drain()
        except BaseException as error:
            attempt.machine.fire(RunEvent.ERROR_RAISED)
            attempt.hub.broadcast(messages.Stop("the driver stopped the run"))
            try:
                if isinstance(error, Exception):
                    self._drain()  # the messages may have the reason
            finally:
                cancel()
            raise
        return self._read(attempt.ending)

    def _receive(self, seconds: float) -> bool:
        """Wait for a message and act on it; return whether there was one."""
        event = self._attempt.hub.get(seconds)
        if event is None:
            return False
        handle(self._attempt, *event)
        return True

    def _advance(self) -> None:
        """Act on the state and the time.

        This follows each message, so what it does must not take longer the more nodes there are.
        """
        attempt = self._attempt
        if attempt.ending is not None:
            return
        if self.state is RunState.WAITING:
            self._start_rendezvous()
        elif error := attempt.deadlines.passed(attempt.nodes, attempt.rendezvous.late_nodes):
            attempt.machine.fire(RunEvent.DEADLINE_PASSED)
            stacks = self._collect_stacks(await_job=isinstance(error, RunTimeout))
            raise type(error)(append_stacks(str(error), stacks), stacks=stacks)
        elif self.state is RunState.RUNNING:
            self._check_stall()
        if self.state is not RunState.STOPPING:
            self._check_nodes()
        settled = attempt.grace_period.is_over() or attempt.outcomes.all_failed
        if settled and attempt.machine.fire(RunEvent.FAILURE_SETTLED):
            attempt.stop_nodes()
        counts_preemptions = attempt.job.settings.max_preemption_failures is not None
        if attempt.job.graceful_shutdown.is_subscribed or counts_preemptions:
            self._notify_leaving()

    def _start_rendezvous(self) -> None:
        """Let the nodes rendezvous once it is decided how."""
        attempt = self._attempt
        event = attempt.rendezvous.decide(self._tasks)
        if event is None:
            return
        attempt.machine.fire(event)
        warn_about_nodes(attempt.nodes.warnings)
        if event is RunEvent.ALL_NODES_UP:
            check_alike(attempt.nodes.software | {"the driver": pickling_software()})
            attempt.hub.broadcast(attempt.rendezvous.address)
            return
        attempt.grace_period.expect(len(attempt.nodes.linked))
        if event is RunEvent.SOME_NODES_UNLINKED:
            attempt.hub.broadcast(messages.RendezvousThroughSpark())
            return
        attempt.deadlines.start_unlinked_run()
        attempt.warn_about_links()
        if self._tasks.have_started:
            attempt.show_start()

    def _check_nodes(self) -> None:
        """Raise if a node no longer answers."""
        nodes = self._attempt.nodes
        if lost := nodes.lost:
            raise NodeLost(
                f"{nodes.describe(lost)}: no sign of life for {NODE_LEASE_SECONDS:g} s. The host "
                "has no connection to this one, is stopped or is dead. Its ranks stop by "
                "themselves as soon as they notice.",
                silent=tuple(nodes.hosts[node] for node in lost),
            )

    def _check_stall(self) -> None:
        """Report where the ranks are if all of them have been idle for too long."""
        attempt = self._attempt
        if not attempt.nodes.all_up:
            return  # the activity of these nodes is not known
        if stall := attempt.stalls.check(attempt.nodes.working):
            if stall.ends_attempt:
                attempt.machine.fire(RunEvent.DEADLINE_PASSED)
            stall.report(self._collect_stacks())

    def _collect_stacks(self, await_job: bool = False) -> dict[int, str]:
        """Return the stacks of the ranks that are still at work, by rank.

        Parameters
        ----------
        await_job : bool
            Whether nodes without a link report theirs in the error that ends their task.
        """
        attempt = self._attempt
        handle(attempt, HERE, messages.StackRequest())
        asked = set(attempt.nodes.linked)
        await_job = await_job and bool(attempt.nodes.unreported)
        seconds = deadlines.UNLINKED_STACKS_SECONDS if await_job else deadlines.STACKS_SECONDS
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (
            attempt.stacks.missing(asked & attempt.nodes.linked)
            or (await_job and attempt.ending is None)
        ):
            self._receive(TICK)
        return attempt.outcomes.stacks_in(attempt.ending) | attempt.stacks.by_rank()

    def _notify_leaving(self) -> None:
        """Notify the ranks if Spark is about to end an executor."""
        attempt = self._attempt
        if leaving := self._decommissioning.poll(set(attempt.nodes.hosts.values())):
            executors = listed("executor", sorted(leaving))
            notify(f"Spark is about to end {executors}: the ranks are notified.")
            attempt.preempt(set(leaving.values()))

    def _drain(self) -> None:
        """Receive messages until all links are closed, for at most `DRAIN_SECONDS`."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._attempt.nodes.linked and time.monotonic() < deadline:
            self._receive(TICK)
        while self._receive(0):
            pass
        self._attempt.machine.fire(RunEvent.DRAINED)

    def _read(self, ending: list[Any] | BaseException) -> list[Outcome]:
        """Return the outcomes, and warn if no node has had a link."""
        attempt = self._attempt
        never_linked = not attempt.nodes.hosts and attempt.rendezvous.method is None
        if isinstance(ending, BaseException):
            try:
                outcomes = attempt.outcomes.after_error(ending, attempt.nodes.first_lost)
            except NodeLost as error:
                attempt.note_reclaimed(error.reclaimed)
                raise
            if never_linked:
                attempt.warn_about_links()
            return outcomes
        if never_linked:
            attempt.warn_about_links()
        attempt.show_start()  # a short run without a link may end before its start is known
        for message in late_output_in(ending):
            attempt.sink.write(message.rank, message.source, message.data)
        return attempt.outcomes.after_success(ending)
