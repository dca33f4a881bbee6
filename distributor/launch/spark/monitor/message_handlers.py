"""What each message of a node, or of the job's thread, changes in an attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributor.launch.one_time_warnings import warn_about_nodes
from distributor.launch.spark.monitor.attempt import Attempt
from distributor.launch.spark.monitor.run_state import RunEvent
from distributor.wire import hub as wire_hub
from distributor.wire import messages
from distributor.wire.hub import LOST


@dataclass(frozen=True)
class JobEnded:
    """The job's thread to the monitor: the job's rows, or the exception that ended it."""

    ending: list[Any] | BaseException


def handle(attempt: Attempt, node: int, message: Any) -> None:
    """Act on a message of a node; the node is `HERE` for messages of this process."""
    _HANDLERS[type(message)](attempt, node, message)


def _link_event(attempt: Attempt, node: int, message: wire_hub.Lost) -> None:
    attempt.stalls.forget(node)
    if message is LOST:
        attempt.nodes.lose_link(node)
    else:
        attempt.nodes.stop_responding(node)


def _job_ended(attempt: Attempt, node: int, message: JobEnded) -> None:
    attempt.ending = message.ending
    attempt.machine.fire(RunEvent.JOB_ENDED)


def _preparing(attempt: Attempt, node: int, message: messages.Preparing) -> None:
    attempt.nodes.prepare(node, message.host)


def _program_wanted(attempt: Attempt, node: int, message: messages.ProgramWanted) -> None:
    attempt.programs.want(node, message.folder)


def _program_relay(attempt: Attempt, node: int, message: messages.ProgramRelay) -> None:
    attempt.programs.relay(message.host, message.port)


def _program_stored(attempt: Attempt, node: int, message: messages.ProgramStored) -> None:
    attempt.programs.stored(node, message.folder)


def _node_up(attempt: Attempt, node: int, message: messages.NodeUp) -> None:
    attempt.nodes.come_up(node, message)
    if attempt.rendezvous.method == "spark":
        attempt.withdraw_warning(node)
        warn_about_nodes({message.host: message.warnings})
        attempt.grace_period.expect(len(attempt.nodes.linked))
        attempt.hub.send(node, messages.RendezvousThroughSpark())


def _rendezvous(attempt: Attempt, node: int, message: messages.Rendezvous) -> None:
    attempt.rendezvous.address = message


def _ranks_started(attempt: Attempt, node: int, message: messages.RanksStarted) -> None:
    attempt.grace_period.note_start(node)
    attempt.nodes.started.add(node)
    attempt.job.progress.add_started(attempt.plan.ranks_per_task)
    if attempt.rendezvous.has_late_nodes:
        return
    if attempt.machine.fire(RunEvent.RANKS_STARTED):
        attempt.deadlines.start_run()
        if attempt.rendezvous.method == "spark":  # no node is merely slow: all have synchronized
            attempt.warn_about_links()
    attempt.show_start()


def _output(attempt: Attempt, node: int, message: messages.Output) -> None:
    attempt.sink.write(message.rank, message.source, message.data)


def _value_start(attempt: Attempt, node: int, message: messages.ValueStart) -> None:
    if refusal := attempt.outcomes.receiver.start(message):
        attempt.hub.send(node, refusal)


def _value_part(attempt: Attempt, node: int, message: messages.ValuePart) -> None:
    if receipt := attempt.outcomes.receiver.take(message):
        attempt.hub.send(node, receipt)


def _failed(attempt: Attempt, node: int, message: messages.Failed) -> None:
    attempt.outcomes.add_failure(message.failure)
    attempt.job.failures.append(message.failure)
    attempt.grace_period.note_failure(message.failure)


def _idle(attempt: Attempt, node: int, message: messages.Idle) -> None:
    attempt.stalls.note(node, message.seconds)


def _stack_request(attempt: Attempt, node: int, message: messages.StackRequest) -> None:
    attempt.stacks.clear()
    attempt.hub.broadcast(message)


def _stacks(attempt: Attempt, node: int, message: messages.Stacks) -> None:
    attempt.stacks.add(node, message.stacks)
    if not attempt.stacks.missing(attempt.nodes.linked):
        attempt.job.stack_requests.answer(attempt.stacks.by_rank())


def _subscribed(attempt: Attempt, node: int, message: messages.Subscribed) -> None:
    attempt.job.graceful_shutdown.subscribe()


def _preempted(attempt: Attempt, node: int, message: messages.Preempted) -> None:
    attempt.preempt({attempt.nodes.hosts[node]})


def _node_done(attempt: Attempt, node: int, message: messages.NodeDone) -> None:
    attempt.nodes.finish(node)
    if attempt.nodes.all_done:
        attempt.hub.broadcast(messages.Release())


_HANDLERS: dict[type, Callable[[Attempt, int, Any], None]] = {
    wire_hub.Lost: _link_event,
    JobEnded: _job_ended,
    messages.Preparing: _preparing,
    messages.ProgramWanted: _program_wanted,
    messages.ProgramRelay: _program_relay,
    messages.ProgramStored: _program_stored,
    messages.NodeUp: _node_up,
    messages.Rendezvous: _rendezvous,
    messages.RanksStarted: _ranks_started,
    messages.Output: _output,
    messages.ValueStart: _value_start,
    messages.ValuePart: _value_part,
    messages.Failed: _failed,
    messages.Idle: _idle,
    messages.StackRequest: _stack_request,
    messages.Stacks: _stacks,
    messages.Subscribed: _subscribed,
    messages.Preempted: _preempted,
    messages.NodeDone: _node_done,
}
