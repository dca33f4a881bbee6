"""Follows an attempt from its start to its outcomes: the same for every launcher.

Messages of nodes, events of the launcher and requests of this process arrive in one queue. A
function for each kind of message notes what it says; after each, the controller looks at what
follows from it and from the time. `TRANSITIONS` has the states of an attempt.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Collection
from typing import Any

from distributor.control.nodes import Nodes, Outcomes, RendezvousDecision
from distributor.control.recovery import Recovery
from distributor.control.run import (
    Attempt,
    Handle,
    LossExplained,
    NodeEnded,
    NodesEnded,
    Resized,
    RunEvent,
)
from distributor.control.sink import DriverSink
from distributor.core.states import StateMachine, Table
from distributor.core.text import counted, listed
from distributor.core.versions import check_alike, pickling_software
from distributor.errors import NodeLost, RunStalled, RunTimeout, StartTimeout
from distributor.node.worker.stacks import append_stacks, place_of
from distributor.policies import Deadlines, FailureGracePeriod, Stall, StallWatch
from distributor.rank.messages import MemberState
from distributor.report.verdict import not_in_collective
from distributor.screen.messages import notify, warn, warn_about_nodes
from distributor.serialization.outcome import Failure, Outcome
from distributor.wire import messages
from distributor.wire.messages import HERE, LOST, Lost
from distributor.wire.protocol import NODE_LEASE_SECONDS

TICK = 0.05
DRAIN_SECONDS = 5.0
"""Seconds for messages that nodes sent over their links before they ended."""
REASON_SECONDS = 2.0
"""Seconds for nodes to report why their ranks have not started, once ``start_timeout`` is over."""
STACKS_SECONDS = 3.0
"""Seconds for the nodes to report the stacks of their ranks."""
UNLINKED_STACKS_SECONDS = 15.0
"""The same if some nodes have no link, and report stacks by failing at the deadline."""


class RunState(enum.Enum):
    """How far an attempt is, as the driver knows it."""

    WAITING = "nodes report one by one; how they agree on a rendezvous is not decided yet"
    STARTING = "the nodes agree on a rendezvous, and start their ranks"
    UNLINKED = "the nodes have no links; the driver knows only what the launcher reports"
    RUNNING = "the ranks of all nodes have started"
    STOPPING = "a rank failed, and the nodes stop the others"
    COLLECTING_STACKS = "a deadline has passed; the nodes report the stacks of their ranks"
    DRAINING = "the nodes have ended; messages that were sent before are still received"
    ABORTING = "the driver raises an error; the nodes stop their ranks, and are cancelled"
    ENDED = "all messages have been received"


class Controller:
    """Follows one attempt.

    Parameters
    ----------
    attempt : Attempt
        The attempt.
    handle : Handle
        Its nodes.
    sink : DriverSink
        Receives the ranks' output.
    start_deadline : float
        When, by `clock`, the ranks of all nodes must have started.
    clock : callable
        Returns monotonic seconds.
    """

    def __init__(
        self,
        attempt: Attempt,
        handle: Handle,
        sink: DriverSink,
        start_deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = attempt.settings
        self._attempt = attempt
        self._handle = handle
        self._links = handle.links
        self._sink = sink
        self._clock = clock
        self._machine = StateMachine(TRANSITIONS, RunState.WAITING, self)
        self._nodes = Nodes(handle.num_nodes, attempt.num_ranks)
        self._rendezvous = RendezvousDecision(self._nodes, start_deadline)
        self._deadlines = Deadlines(start_deadline, settings.timeout)
        self._stalls = StallWatch(settings.stall_warning, settings.stall_timeout)
        self._outcomes = Outcomes(attempt)
        self._grace_period = FailureGracePeriod(handle.num_nodes)
        self._recovery = Recovery(
            attempt, handle, self._nodes, clock, lambda: self.state is RunState.RUNNING
        )
        if self._recovery.is_wanted:
            attempt.on_member_state = self._on_member_state
        self._stacks: dict[int, dict[int, str]] = {}
        self._ending: NodesEnded | None = None
        self._ended: set[int] = set()
        self._start_shown = False
        self._noted_state: RunState | None = None
        self._checkpoints = 0
        self._resizable_at = clock() + settings._resize_interval

    @property
    def state(self) -> RunState:
        """How far the attempt is."""
        return self._machine.state

    def follow(self) -> list[Outcome]:
        """Follow the attempt to its end."""
        run, links = self._attempt.run, self._links
        self._attempt.stack_requests.send = lambda: links.post(messages.StackRequest())
        run.graceful_shutdown.start_attempt(
            lambda: links.broadcast(messages.Preempted(tuple(self._nodes.hosts.values())))
        )
        run.cancellation.set_action(lambda: links.post(messages.Heartbeat()))  # ends the wait
        try:
            while self._ending is None:
                is_idle = not self._receive(TICK)
                self._sink.tick()
                run.graceful_shutdown.advance()
                run.cancellation.check()
                self._advance(is_idle)
            self._drain()
        except BaseException as error:
            self._machine.fire(RunEvent.ERROR_RAISED)
            try:
                if isinstance(error, Exception):
                    self._drain()  # the messages may have the reason
            finally:
                self._handle.cancel()
                with contextlib.suppress(Exception):  # the sink may have raised the error
                    while self._receive(0):
                        pass
                self._outcomes.discard_values()
            raise
        finally:
            run.cancellation.set_action(lambda: None)
            self._outcomes.discard_incomplete()
            self._note_state()
        self._attempt.numbers = self._recovery.members.numbers
        return self._result(self._ending)

    def handle(self, node: int, message: Any) -> None:
        """Act on a message of a node; the node is `HERE` for those of this process.

        One of an unknown type is ignored, as a node does.
        """
        if self._recovery.is_silenced(node) and not isinstance(message, Lost):
            return  # it has nothing to say
        if handler := HANDLERS.get(type(message)):
            handler(self, node, message)

    def _receive(self, seconds: float) -> bool:
        event = self._links.get(seconds)
        if event is None:
            return False
        self.handle(*event)
        return True

    def _receive_while(self, is_wanted: Callable[[], object], seconds: float) -> None:
        """Receive messages as long as something is wanted of them, for at most some seconds."""
        deadline = self._clock() + seconds
        while is_wanted() and self._clock() < deadline:
            self._receive(TICK)

    def _drain(self) -> None:
        """Receive messages until all links are closed, for at most `DRAIN_SECONDS`."""
        self._receive_while(lambda: self._nodes.linked, DRAIN_SECONDS)
        while self._receive(0):
            pass
        self._machine.fire(RunEvent.DRAINED)

    def _result(self, ending: NodesEnded) -> list[Outcome]:
        """Return the outcomes, and warn if no node has had a link."""
        never_linked = not self._nodes.hosts and self._rendezvous.decision is None
        if ending.error is not None:
            try:
                outcomes = self._outcomes.of(ending, self._nodes.first_lost)
            except NodeLost as error:
                self._note_reclaimed(error.reclaimed)
                raise
            if never_linked:
                self._warn_about_links()
            return outcomes
        if never_linked:
            self._warn_about_links()
        self._show_start()  # a short run without a link may end before its start is known
        for message in ending.output:
            self._sink.write(message.rank, message.source, message.data)
        return self._outcomes.of(ending, "")

    # What follows from the state and the time

    def _advance(self, is_idle: bool) -> None:
        """Act on the state and the time. If it is not idle, more messages may be waiting.

        This follows each message, so what it does must not take longer the more nodes there are.
        """
        if self._ending is not None:
            return
        now = self._clock()
        if self.state is RunState.WAITING:
            self._decide_rendezvous(now)
        elif self.state is not RunState.COLLECTING_STACKS:
            self._check_deadlines(now)
        if self.state is RunState.RUNNING and is_idle:
            self._check_stall(now)
        if self.state is not RunState.STOPPING or not self._outcomes.has_cause:
            self._check_nodes()
        if self.state is RunState.RUNNING:
            self._check_size()
            self._recovery.fill()
        if self._grace_period.is_over(now) or self._outcomes.all_failed:
            self._machine.fire(RunEvent.FAILURE_SETTLED)
        if self._deadlines.is_stop_overdue(now):
            self._handle.cancel()  # the nodes then end with an error, beside the failures
        self._note_state()
        counts_preemptions = self._attempt.settings.max_preemption_failures is not None
        is_subscribed = self._attempt.run.graceful_shutdown.is_subscribed
        if is_subscribed or counts_preemptions or self._recovery.goes_on:
            self._notify_leaving()

    def _note_state(self) -> None:
        if self.state is not self._noted_state:
            self._noted_state = self.state
            self._attempt.run.events.add("state", state=self.state.name)

    def _decide_rendezvous(self, now: float) -> None:
        if decision := self._rendezvous.decide(self._handle.starts, now):
            self._machine.fire(decision)

    def _check_deadlines(self, now: float) -> None:
        # A failure is raised once it has settled, even if other ranks never start.
        is_due = now > self._deadlines.start and not self._outcomes.failures
        late = self._rendezvous.late_nodes if is_due else set()
        passed = self._deadlines.passed(now, all_started=not late)
        if passed is None or not self._machine.fire(RunEvent.DEADLINE_PASSED):
            return
        if passed == "start":
            late_text = self._nodes.describe(late)
            stacks = self._await_stacks()
            self._receive_while(lambda: self._ending is None, REASON_SECONDS)
            reported = self._ending.timed_out if self._ending else None
            if isinstance(reported, StartTimeout):
                raise reported  # the node knows what has not started
            text = f"After start_timeout, still starting: {late_text}."
            raise StartTimeout(append_stacks(text, stacks), stacks=stacks)
        stacks = self._await_stacks(await_end=True)
        text = (
            f"The run took longer than its timeout of {self._attempt.settings.timeout:g} s. "
            f"Still busy: {self._busy()}."
        )
        raise RunTimeout(append_stacks(text, stacks), stacks=stacks)

    def _busy(self) -> str:
        """Return the ranks that are at work, as far as their stacks are known."""
        nodes = sorted(self._nodes.working)
        texts = [self._nodes.describe_ranks(node, self._stacks.get(node, ())) for node in nodes]
        return ", ".join(texts) or "no known node"

    def _check_stall(self, now: float) -> None:
        """Show where the ranks are if all of them have been idle for too long."""
        if not self._nodes.all_up:
            return  # the activity of these nodes is not known
        stall = self._stalls.check(self._nodes.working, now)
        if stall is None or (stall.ends_attempt and self._end_hung(stall)):
            return
        if not (stall.ends_attempt and self._machine.fire(RunEvent.DEADLINE_PASSED)):
            self.handle(HERE, messages.StackRequest())
        stacks = self._await_stacks()
        setting = self._attempt.settings.spelling.of(stall.setting)
        text = append_stacks(
            f"No rank has printed, reported, or used its CPU or GPU for {stall.seconds:g} s "
            f"({setting}).",
            stacks,
        )
        if stall.ends_attempt:
            self._attempt.run.events.add_stacks(stacks, stall.seconds, stalled=True)
            raise RunStalled(text, stacks=stacks)
        self._attempt.run.events.add_stacks(stacks, stall.seconds, stalled=False)
        warn(text)

    def _end_hung(self, stall: Stall) -> bool:
        """Have the ranks killed for which others wait; return whether there are some."""
        if not self._recovery.goes_on:
            return False
        self.handle(HERE, messages.StackRequest())
        stacks = self._await_stacks()
        hung = not_in_collective({str(rank): text for rank, text in stacks.items()})
        if not 0 < len(hung) < len(stacks):
            return False
        self._attempt.run.events.add_stacks(stacks, stall.seconds, stalled=False)
        setting = self._attempt.settings.spelling.of(stall.setting)
        for rank in hung:
            cause = f"it hung for {stall.seconds:g} s ({setting}) {place_of(stacks[rank])}".rstrip()
            self._links.send(self._nodes.node_of(rank), messages.EndRank(rank, cause))
        for node in self._nodes.working:
            self._stalls.forget(node)
        return True

    def _await_stacks(self, await_end: bool = False) -> dict[int, str]:
        """Return the stacks of the ranks that are still at work, by rank."""
        asked = set(self._nodes.linked)
        await_end = await_end and bool(self._nodes.unreported)
        self._receive_while(
            lambda: (
                (asked & self._nodes.linked) - self._stacks.keys()
                or (await_end and self._ending is None)
            ),
            UNLINKED_STACKS_SECONDS if await_end else STACKS_SECONDS,
        )
        timed_out = self._ending.timed_out if self._ending else None
        return (timed_out.stacks if timed_out else {}) | self._stacks_by_rank()

    def _stacks_by_rank(self) -> dict[int, str]:
        return {rank: text for stacks in self._stacks.values() for rank, text in stacks.items()}

    def _check_nodes(self) -> None:
        """Raise if a node no longer answers."""
        if lost := self._nodes.lost:
            self._attempt.silent = tuple(self._nodes.hosts[node] for node in lost)
            raise NodeLost(
                f"{self._nodes.describe(lost)}: no sign of life for {NODE_LEASE_SECONDS:g} s. The "
                "host has no connection to this one, is stopped or is dead. Its ranks stop by "
                "themselves as soon as they notice.",
                silent=self._attempt.silent,
            )

    def _check_size(self) -> None:
        """End the attempt after a checkpoint if the next one would have more ranks."""
        reported = self._attempt.progress.checkpoints
        if reported == self._checkpoints or self._recovery.goes_on:
            return
        self._checkpoints = reported
        if (now := self._clock()) < self._resizable_at:
            return
        self._resizable_at = now + self._attempt.settings._resize_interval
        if not self._attempt.preempted and (further := self._handle.further_ranks()):
            raise Resized(
                f"There is room for {counted(further, 'further rank')}: the next attempt continues "
                f"from the checkpoint with {self._attempt.num_ranks + further} ranks."
            )

    def _notify_leaving(self) -> None:
        """Notify the ranks if the cluster is about to end a process of theirs."""
        leaving = self._handle.leaving(set(self._nodes.hosts.values()))
        if leaving is not None and not self._recovery.let_leave(leaving):
            notify(leaving.text)
            self._preempt(leaving.hosts)

    def _preempt(self, hosts: Collection[str]) -> None:
        """Note that hosts are about to lose a process, and notify all ranks."""
        self._attempt.preempted.update(self._nodes.ranks_on(hosts))
        self._attempt.run.events.add("preempted", hosts=sorted(hosts))
        self._links.broadcast(messages.Preempted(tuple(hosts)))

    def _note_reclaimed(self, hosts: Collection[str]) -> None:
        """Note that hosts have lost a process to another application, without a notice."""
        self._attempt.preempted.update({host: [] for host in hosts} | self._nodes.ranks_on(hosts))

    def _show_start(self) -> None:
        if not self._start_shown:
            self._start_shown = True
            run, logger = self._attempt.run, self._attempt.settings.spelling.logger
            run.notify(f"Started {run.launcher.training(self._attempt.num_ranks)}", logger)

    def _warn_about_links(self) -> None:
        """Warn about the nodes that have no link to this process, if there are any."""
        if unlinked := self._nodes.unlinked:
            warn(self._handle.describe_unlinked(listed("Node", unlinked)))

    # Actions of the table

    def _send_rendezvous(self) -> None:
        """Compare the nodes' versions, and send all nodes the address of rank 0's store."""
        warn_about_nodes(self._nodes.warnings)
        check_alike(self._nodes.software | {"the driver": pickling_software()})
        self._links.broadcast(self._nodes.stores[0])
        self._recovery.choose_store()

    def _follow_unlinked(self) -> None:
        """Warn the user. Have all nodes go on without links, at most a minute beyond `timeout`."""
        prepares = bool(self._attempt.settings.environment)
        self._deadlines.start_unlinked_run(self._clock(), prepares=prepares)
        self._warn_about_links()
        self._nodes = Nodes(self._nodes.count, self._attempt.num_ranks)
        self._links.broadcast(messages.Unlink())
        starts = self._handle.starts
        if starts.have_started or starts.reports_unlinked:  # those that wait have started
            self._show_start()

    def _start_clock(self) -> None:
        """Start the clock of `timeout`."""
        self._deadlines.start_run(self._clock())

    def _start_late_clock(self) -> None:
        """Start the clock of `timeout`: ranks that do not stop end by it."""
        self._start_clock()

    def _stop_nodes(self) -> None:
        """Ask the nodes to stop their ranks."""
        self._nodes.stopping = True
        # A node without a link may have the cause: the launcher then reports why it was lost.
        in_vain = bool(self._nodes.unlinked) and self._outcomes.has_cause
        self._deadlines.start_stop(self._clock(), in_vain=in_vain)
        self._links.broadcast(messages.Stop("a rank failed"))

    def _request_stacks(self) -> None:
        """Ask the nodes for the stacks of their ranks."""
        self.handle(HERE, messages.StackRequest())

    def _stop_survivors(self) -> None:
        """Stop the other nodes if one has failed. Receive the messages that are on their way."""
        assert self._ending is not None
        if self._ending.error is not None:
            # Spark kills the workers of the other tasks, but only after two seconds.
            self._nodes.stopping = True
            self._links.broadcast(messages.Stop("a node has failed"))
        elif self._recovery.is_wanted:  # nodes that would have joined
            self._links.broadcast(messages.Stop("the other ranks have finished"))

    def _abort(self) -> None:
        """Ask the nodes to stop their ranks, receive the messages on their way, cancel them."""
        self._links.broadcast(messages.Stop("the driver stopped the run"))

    def _end(self) -> None:
        """Return the outcomes, or raise the error."""

    # Messages

    def _on_lost(self, node: int, message: Lost) -> None:
        self._stalls.forget(node)
        if message is not LOST:
            self._nodes.unresponsive.add(node)
        elif self._recovery.note_link_end(node):
            return
        else:
            self._nodes.lose_link(node)
        self._recovery.lose_link(node, message)
        self._check_ends()

    def _on_nodes_ended(self, node: int, message: NodesEnded) -> None:
        if self._ending is None:
            self._ending = message
            self._machine.fire(RunEvent.NODES_ENDED)

    def _on_node_ended(self, node: int, message: NodeEnded) -> None:
        if not self._recovery.survive_end(message):
            self._ended.add(message.node)
            if message.error:
                timed_out = message.error if isinstance(message.error, StartTimeout) else None
                explain = message.explain
                ended = NodesEnded(error=message.error, timed_out=timed_out, explain=explain)
                self._on_nodes_ended(node, ended)
        self._check_ends()

    def _check_ends(self) -> None:
        """End the attempt once all nodes that it has have ended."""
        if self._ended >= self._nodes.present:
            self._on_nodes_ended(HERE, NodesEnded())

    def _on_node_failed(self, node: int, message: messages.NodeFailed) -> None:
        if self._recovery.survive_error(node, message.error):
            return
        if self._ending is not None and self._ending.error is None:
            self._ending = None  # the launcher has reported the node's end sooner
        self._on_node_ended(node, NodeEnded(node, message.error))

    def _on_preparing(self, node: int, message: messages.Preparing) -> None:
        self._nodes.preparing[node] = message.host

    def _on_node_up(self, node: int, message: messages.NodeUp) -> None:
        if self._rendezvous.decision is RunEvent.NODES_UNLINKED:  # it is late
            self._links.send(node, messages.Unlink())
        else:
            self._nodes.come_up(node, message, self._clock())
        if node not in self._nodes.present:
            self._recovery.welcome(node, message)

    def _on_rendezvous(self, node: int, message: messages.Rendezvous) -> None:
        self._nodes.stores[node] = message

    def _on_ranks_started(self, node: int, message: messages.RanksStarted) -> None:
        self._grace_period.note_start(node, self._clock())
        self._nodes.started.add(node)
        ranks, host = list(self._nodes.ranks_of(node)), self._nodes.hosts[node]
        self._recovery.note_start(node)
        self._attempt.progress.start(ranks, host)
        self._attempt.run.events.add("started", ranks=ranks, host=host)
        if not self._rendezvous.late_nodes:
            self._machine.fire(RunEvent.RANKS_STARTED)
            self._show_start()

    def _on_output(self, node: int, message: messages.Output) -> None:
        if message.source in ("stdout", "stderr") and self._nodes.all_up:
            self._show_start()  # another rank may begin later
        self._deadlines.note_output(self._clock())
        self._sink.write(message.rank, message.source, message.data)

    def _on_value_start(self, node: int, message: messages.ValueStart) -> None:
        if refusal := self._outcomes.start_value(message):
            self._links.send(node, refusal)

    def _on_value_part(self, node: int, message: messages.ValuePart) -> None:
        if receipt := self._outcomes.add_part(message):
            self._links.send(node, receipt)

    def _on_whole_value(self, node: int, message: messages.WholeValue) -> None:
        self._outcomes.values[message.value.rank] = message.value

    def _on_failed(self, node: int, message: messages.Failed) -> None:
        failure = message.failure
        self._attempt.note_end([failure.origin.rank], "failed")
        self._attempt.run.events.add_failure(failure)
        if not self._recovery.survive_rank(node, failure):
            self._end_by(failure)

    def _end_by(self, *failures: Failure) -> None:
        """End the attempt because of failures, after those that it has not survived yet."""
        failures = (*self._recovery.take_back(), *failures)
        self._outcomes.failures += failures
        for failure in failures:
            self._grace_period.note_failure(failure, self._clock())

    def _on_member_state(self, rank: int, state: MemberState) -> None:
        self._recovery.note_state(rank, state)
        members = self._recovery.members
        if members.reason_of_end is None or self._outcomes.failures:
            return
        self._attempt.run.notify(f"The other ranks do not go on: {members.reason_of_end}.")
        if not members.pending:
            raise NodeLost("The ranks have lost their connections to each other.")
        self._end_by()

    def _on_loss_explained(self, node: int, message: LossExplained) -> None:
        self._recovery.note_explanation(message)

    def _on_idle(self, node: int, message: messages.Idle) -> None:
        self._stalls.note(node, message.seconds, self._clock())

    def _on_stack_request(self, node: int, message: messages.StackRequest) -> None:
        self._stacks = {}
        self._links.broadcast(message)
        self._answer_stacks()  # at once if no node has a link yet

    def _on_stacks(self, node: int, message: messages.Stacks) -> None:
        self._stacks[node] = message.stacks
        self._answer_stacks()

    def _answer_stacks(self) -> None:
        if not self._nodes.linked - self._stacks.keys():
            self._attempt.stack_requests.answer(self._stacks_by_rank())

    def _on_subscribed(self, node: int, message: messages.Subscribed) -> None:
        self._attempt.run.graceful_shutdown.subscribe()

    def _on_preempted(self, node: int, message: messages.Preempted) -> None:
        self._preempt({self._nodes.hosts[node]})

    def _on_node_done(self, node: int, message: messages.NodeDone) -> None:
        self._nodes.done.add(node)
        self._nodes.working.discard(node)
        self._attempt.note_end(list(self._nodes.ranks_of(node)), "finished")
        if self._nodes.all_done:
            self._links.broadcast(messages.Release())


HANDLERS: dict[type, Callable[[Controller, int, Any], None]] = {
    Lost: Controller._on_lost,
    NodesEnded: Controller._on_nodes_ended,
    NodeEnded: Controller._on_node_ended,
    messages.Preparing: Controller._on_preparing,
    messages.NodeUp: Controller._on_node_up,
    messages.Rendezvous: Controller._on_rendezvous,
    messages.RanksStarted: Controller._on_ranks_started,
    messages.Output: Controller._on_output,
    messages.ValueStart: Controller._on_value_start,
    messages.ValuePart: Controller._on_value_part,
    messages.WholeValue: Controller._on_whole_value,
    messages.Failed: Controller._on_failed,
    messages.Idle: Controller._on_idle,
    messages.StackRequest: Controller._on_stack_request,
    messages.Stacks: Controller._on_stacks,
    messages.Subscribed: Controller._on_subscribed,
    messages.Preempted: Controller._on_preempted,
    messages.NodeDone: Controller._on_node_done,
    messages.NodeFailed: Controller._on_node_failed,
    LossExplained: Controller._on_loss_explained,
}

_BEFORE_ITS_END = (
    RunState.WAITING,
    RunState.STARTING,
    RunState.UNLINKED,
    RunState.RUNNING,
    RunState.STOPPING,
)
_WITH_RANKS = _BEFORE_ITS_END[1:]
_ALL_BUT_ITS_END = (*_BEFORE_ITS_END, RunState.COLLECTING_STACKS, RunState.DRAINING)

TRANSITIONS: Table[RunState] = {
    (state, event): (next_state, action)
    for event, states, next_state, action in (
        (RunEvent.ALL_NODES_UP, [RunState.WAITING], RunState.STARTING, Controller._send_rendezvous),
        (
            RunEvent.NODES_UNLINKED,
            [RunState.WAITING],
            RunState.UNLINKED,
            Controller._follow_unlinked,
        ),
        (RunEvent.RANKS_STARTED, [RunState.STARTING], RunState.RUNNING, Controller._start_clock),
        (
            RunEvent.RANKS_STARTED,
            [RunState.STOPPING],
            RunState.STOPPING,
            Controller._start_late_clock,
        ),
        (
            RunEvent.FAILURE_SETTLED,
            [RunState.STARTING, RunState.RUNNING],
            RunState.STOPPING,
            Controller._stop_nodes,
        ),
        (
            RunEvent.DEADLINE_PASSED,
            _WITH_RANKS,
            RunState.COLLECTING_STACKS,
            Controller._request_stacks,
        ),
        (RunEvent.NODES_ENDED, _BEFORE_ITS_END, RunState.DRAINING, Controller._stop_survivors),
        (RunEvent.ERROR_RAISED, _ALL_BUT_ITS_END, RunState.ABORTING, Controller._abort),
        (RunEvent.DRAINED, [RunState.DRAINING, RunState.ABORTING], RunState.ENDED, Controller._end),
    )
    for state in states
}
"""The next state, and what the controller does, for each event that a state allows.

All other events come too late, and are ignored: a rank starts while the others are stopped, or the
nodes end while the driver raises an error.
"""
