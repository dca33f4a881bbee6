"""Starts, watches and stops the ranks of one node."""

from __future__ import annotations

import math
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO, NoReturn

from distributor.core import processes
from distributor.core.rank_variables import RUN_ID
from distributor.core.text import Redaction
from distributor.errors import NodeLost, RunStalled, RunTimeout, StartTimeout
from distributor.node.agent.output import AgentListener, LogRelay
from distributor.node.agent.usage import (
    ActivityMonitor,
    RanksMonitor,
    SystemMetrics,
    has_host_usage,
)
from distributor.node.agent.worker_handle import WorkerHandle, WorkerSelector, start_worker
from distributor.node.process.specs import NodeShare, Role
from distributor.node.process.supervisor import Spawner
from distributor.node.worker.stacks import append_stacks, dump_stacks
from distributor.policies import FailureGracePeriod
from distributor.rank import messages
from distributor.rank.membership import Members
from distributor.serialization.outcome import Failure, Outcome, Value, death, loss
from distributor.wire.messages import (
    EndRank,
    Idle,
    MembersChanged,
    Preempted,
    RanksStarted,
    ReplaceRank,
    Stacks,
    Subscribed,
)

RELAY_INTERVAL = 0.05
"""Seconds between two reads of what the ranks printed."""
WATCH_INTERVAL = 0.02
"""The same if ranks may be replaced: they are also asked whether they have begun to end."""
TERMINATION_GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""
LINGERING_WARNING_SECONDS, LINGERING_KILL_SECONDS = 30.0, 600.0
"""Seconds after its work at which a rank that has not ended is reported, and is killed."""
KILL_SECONDS = 30.0
"""Seconds from SIGKILL after which a process is left alone, because it hangs in the kernel."""


class Agent:
    """Runs one node's ranks until they end; a context manager that leaves none behind.

    Parameters
    ----------
    node : NodeShare
        The node's share of the run.
    program : BinaryIO
        A file with the `Program` that each rank runs.
    spawner : Spawner
        Starts the processes of the ranks.
    listener : AgentListener
        Receives the ranks' output, and the events of their lives.
    store_socket : socket, optional
        The bound socket for the rendezvous store, on the node that has rank 0.
    data : BinaryIO, optional
        A file with the node's part of the run's datasets.
    head_start : float, default 0.0
        Seconds in which the driver may decide about a failure before the agent does.
    """

    def __init__(
        self,
        node: NodeShare,
        program: BinaryIO,
        spawner: Spawner,
        listener: AgentListener,
        *,
        store_socket: socket.socket | None = None,
        data: BinaryIO | None = None,
        head_start: float = 0.0,
    ) -> None:
        self._node = node
        self._program = program
        self._spawner = spawner
        self._listener = listener
        self._store_socket = store_socket
        self._data = data
        self._head_start = head_start
        self._workers: list[WorkerHandle] = []
        self._store: WorkerHandle | None = None
        self._lost: list[WorkerHandle] = []  # ranks that the others survive, until they have ended
        self._selector = WorkerSelector(self._handle)
        self._failures: list[Failure] = []
        self._grace_period = FailureGracePeriod(node.ranks_per_node)
        self._redaction = Redaction(node.env)
        has_metrics = RUN_ID in node.env and has_host_usage()
        self._system_metrics = SystemMetrics(node.name) if has_metrics else None
        self._log_relay = LogRelay(listener, self._redaction)
        self._ranks = RanksMonitor(self._workers, node)
        self._activity = ActivityMonitor(self._workers, node.activity_interval, node.uses_gpus)
        self._num_starting = node.ranks_per_node
        self._all_started_at = math.inf
        self._has_reported_done = self._is_stopping = False
        # Requests of other threads.
        self._wants_release = self._wants_stop = self._wants_kill = self._wants_stacks = False
        self._notices: deque[bytes] = deque()
        self._changes: deque[MembersChanged | ReplaceRank | EndRank] = deque()
        self._awaits_decision = False  # of the driver, about a rank that has failed

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self._stop_all()
            if self._workers and self._node.settings.step_times:
                self._write_use(self._ranks.sample(time.monotonic()))
            if kind is not None and issubclass(kind, Exception):
                self._log_relay.drain(self._workers)  # the output may show why it was cut short
        finally:
            for worker in self._workers:
                worker.close(keep_value=kind is None)
            for worker in filter(None, (*self._lost, self._store)):
                worker.close(keep_value=False)
            self._selector.close()

    def run(self, start_deadline: float = math.inf, timeout: float = math.inf) -> list[Outcome]:
        """Start the ranks and wait until all of them have ended.

        The calling thread may become the parent of the ranks: they are killed when it ends.
        """
        if self._node.goes_on and self._store_socket is not None:
            self._store = self._start_store(self._store_socket)  # so that any rank may be lost
        for local_rank in range(self._node.ranks_per_node):
            self._start_rank(local_rank, "replacement" if self._node.joins else "rank")
        if self._store_socket is not None:
            self._store_socket.close()  # rank 0 alone holds it, so that its death frees the port
        has_more_output = False
        interval = WATCH_INTERVAL if self._node.goes_on else RELAY_INTERVAL
        while self._is_busy():
            self._selector.wait(0.0 if has_more_output else interval)
            has_more_output = self._log_relay.relay(self._workers)
            self._report_usage()
            self._note_exits()
            self._close_lost()
            self._check_store()
            self._check_deadlines(start_deadline, timeout)
            self._answer_requests()
            self._change_members()
            self._release_or_stop()
            self._report_work_done()
        self._report_work_done()
        self._close_lost(at_once=True)
        self._log_relay.drain(self._workers)
        values = [worker.outcome for worker in self._workers if isinstance(worker.outcome, Value)]
        return [*self._failures, *values]

    def _is_busy(self) -> bool:
        if any(worker.running for worker in self._workers):
            return True
        self._note_exits()  # of processes that ended after the last check
        return self._awaits_decision

    def _start_rank(self, local_rank: int, role: Role, former: int = 0) -> None:
        worker = self._start(self._node, local_rank, role, former)
        self._workers.append(worker)
        self._selector.add(worker)
        if role == "replacement":  # the former one may have been killed while it wrote a line
            self._listener.write(worker.origin.rank, "progress", b"\n")

    def _start_store(self, listener: socket.socket) -> WorkerHandle:
        port = listener.getsockname()[1]
        return self._start(
            replace(self._node, master_addr=self._node.address, master_port=port), 0, "store"
        )

    def _start(self, node: NodeShare, local_rank: int, role: Role, former: int = 0) -> WorkerHandle:
        return start_worker(
            node,
            local_rank,
            self._program,
            self._spawner,
            store_socket=self._store_socket,
            data=self._data,
            on_exit=self._selector.wake,
            role=role,
            former=former,
        )

    # Requests, from any thread

    def release(self) -> None:
        """Let rank 0 end, because all ranks of all nodes have done their work. From any thread."""
        self._wants_release = True
        self._selector.wake()

    def stop(self) -> None:
        """Stop the ranks, because the run has failed elsewhere or is cancelled. From any thread."""
        self._wants_stop = True
        self._selector.wake()

    def kill(self) -> None:
        """Stop the ranks without a grace period. From any thread."""
        self._wants_kill = True
        self.stop()

    def request_stacks(self) -> None:
        """Send the stacks of the active ranks soon. From any thread."""
        self._wants_stacks = True
        self._selector.wake()

    def notify_preemption(self, here: bool) -> None:
        """Notify the ranks that a process is about to end, here or elsewhere. From any thread."""
        notice = messages.NOTICE_HERE if here else messages.NOTICE
        self._notices.append(notice)  # ranks count them: each one is sent
        self._selector.wake()

    def change(self, change: MembersChanged | ReplaceRank | EndRank) -> None:
        """Change which ranks there are. From any thread."""
        self._changes.append(change)
        self._selector.wake()

    # Events of workers

    def _handle(self, worker: WorkerHandle, message: bytes) -> None:
        match message:
            case messages.STARTED:
                self._note_start(worker)
            case messages.VALUE:
                worker.settle(Value(worker.origin.rank, worker.outcome_file))
            case messages.FAILURE:
                worker.outcome_file.seek(0)
                self._note_failure(worker, pickle.load(worker.outcome_file))
            case messages.EXIT:
                self._note_death(worker, worker.control.recv(1)[0])
            case messages.SUBSCRIBED:
                self._listener.send(Subscribed())
            case messages.IGNORES_SIGTERM:
                worker.ignores_sigterm = True
            case messages.SIGTERM_RECEIVED if not self._is_stopping:
                self._listener.send(Preempted())

    def _note_start(self, worker: WorkerHandle) -> None:
        if not self._num_starting:
            return  # it replaces another
        self._grace_period.note_start(worker.origin.rank, time.monotonic())
        self._num_starting -= 1
        if not self._num_starting:
            self._all_started_at = time.monotonic()
            self._activity.start()
            self._listener.send(RanksStarted())

    def _note_exits(self) -> None:
        """Find the processes that ended without an outcome."""
        for worker in self._workers:
            if worker.outcome is None and not self._is_stopping:
                returncode = worker.process.returncode
                if returncode is None and self._node.goes_on:
                    returncode = processes.early_exit_code(worker.pid)
                if returncode is not None:
                    self._selector.read_rest(worker)
                    if worker.outcome is None:
                        self._note_death(worker, returncode)

    def _note_death(self, worker: WorkerHandle, returncode: int) -> None:
        tail = self._redaction.of_text(worker.tail())
        self._note_failure(worker, death(worker.origin, returncode, tail))

    def _note_failure(self, worker: WorkerHandle, failure: Failure) -> None:
        if self._is_stopping:
            return  # the failure is a consequence of the stop
        failure = redact(failure, self._redaction)
        worker.settle(failure)
        self._failures.append(failure)
        if self._node.goes_on:
            # Whether the others can go on, if they have reported it.
            self._log_relay.relay(self._workers)
        if self._listener.on_rank_failed(failure):
            self._awaits_decision = True
        else:
            self._grace_period.note_failure(failure, time.monotonic())

    # What follows from events, requests and the time

    def _report_usage(self) -> None:
        if self._system_metrics and (sample := self._system_metrics.sample_if_due()):
            self._write_use(sample)
        if use := self._ranks.sample_if_due():
            self._write_use(use)
        if (seconds := self._activity.idle_seconds_if_due()) is not None:
            self._listener.send(Idle(seconds))

    def _write_use(self, record: messages.Record) -> None:
        self._listener.write(self._node.origin(0).rank, "usage", messages.line_of(record))

    def _check_deadlines(self, start_deadline: float, timeout: float) -> None:
        now = time.monotonic()
        if now >= self._all_started_at + timeout:
            self._raise_timeout(RunTimeout, "The run was stopped at its timeout.")
        if now >= start_deadline and self._num_starting and not self._failures:
            self._raise_timeout(StartTimeout, "Not all ranks began within start_timeout.")

    def _check_store(self) -> None:
        if self._store is not None and not self._store.running and not self._is_stopping:
            raise NodeLost(f"The process on {self._node.host} that serves the store has ended.")

    def _raise_timeout(self, kind: type[RunTimeout] | type[StartTimeout], reason: str) -> NoReturn:
        stacks = self._stacks()
        busy = [str(worker.origin) for worker in self._workers if worker.working]
        text = f"{reason} Still busy: {'; '.join(busy) or 'no rank'}."
        raise kind(append_stacks(text, stacks), stacks=stacks)

    def _answer_requests(self) -> None:
        if self._wants_stacks:
            self._wants_stacks = False
            self._listener.send(Stacks(self._stacks()))
        while self._notices:
            notice = self._notices.popleft()
            for worker in self._workers:
                worker.send(notice)

    def _change_members(self) -> None:
        while self._changes:
            match self._changes.popleft():
                case ReplaceRank(rank, members):
                    self._go_on_with(members)
                    self._spawner.extend_limit()
                    former = [0, *(each.pid for each in self._lost if each.origin.rank == rank)][-1]
                    self._start_rank(rank - self._node.origin(0).rank, "replacement", former)
                case EndRank(rank, cause):
                    self._end_rank(rank, cause)
                case MembersChanged(members):
                    self._go_on_with(members)

    def _end_rank(self, rank: int, cause: str) -> None:
        """Kill a rank that hangs: it has failed."""
        for worker in self._workers:
            if worker.origin.rank == rank and worker.working:
                worker.process.kill()
                self._note_failure(worker, loss(worker.origin, cause, RunStalled))

    def _go_on_with(self, members: Members) -> None:
        """Have these ranks go on without those that have failed."""
        failed = [worker for worker in self._workers if isinstance(worker.outcome, Failure)]
        others = self._workers if members.change == "end" else failed
        lost = [worker for worker in others if worker.origin.rank not in members.numbers]
        self._failures = [each for each in self._failures if each.origin.rank in members.numbers]
        self._log_relay.relay(lost)  # the rest later: one that has failed may still print
        for worker in lost:
            if worker.outcome is None:  # it has come too late
                worker.process.kill()
            worker.release()
            self._workers.remove(worker)
            self._selector.remove(worker)
        self._lost += lost
        self._awaits_decision = bool(self._failures)
        for worker in self._workers:
            worker.send(messages.MEMBERS + members.to_line())

    def _close_lost(self, at_once: bool = False) -> None:
        """Close what is left of lost ranks that have ended; kill those that do not end."""
        now = time.monotonic()
        for worker in [*self._lost]:
            if at_once or now > worker.released_at + TERMINATION_GRACE_SECONDS:
                worker.process.kill()  # its replacement waits for its memory
            if at_once:
                worker.process.join(KILL_SECONDS)
            if not worker.running:
                self._log_relay.drain([worker])  # its exit handlers may have printed more
                worker.close(keep_value=False)
                self._lost.remove(worker)

    def _stacks(self) -> dict[int, str]:
        """Return the stacks of the ranks that have no outcome yet."""
        stacks = dump_stacks({w.origin.rank: w for w in self._workers if w.working})
        self._activity.disregard_latest()  # to write them takes CPU time
        return stacks

    def _release_or_stop(self) -> None:
        is_over = self._grace_period.is_over(time.monotonic() - self._head_start)
        if self._wants_stop or is_over:
            self._stop_all()
        for worker in self._workers:
            has_value = isinstance(worker.outcome, Value)
            serves_store = worker.origin.rank == 0 and has_value and self._store is None
            if worker.outcome is not None and (self._wants_release or not serves_store):
                worker.release()
        limit_lingering(self._workers, self._listener)

    def _report_work_done(self) -> None:
        """Report once that all workers have ended with a value; rank 0 may still run."""
        if not self._has_reported_done and all(
            isinstance(worker.outcome, Value) and (worker.origin.rank == 0 or not worker.running)
            for worker in self._workers
        ):
            self._has_reported_done = True
            self._listener.on_work_done()

    def _stop_all(self) -> None:
        """Stop the workers that run: SIGTERM to their process groups, a grace period, SIGKILL.

        A worker whose outcome is known is ending: it has the grace period for its exit handlers.
        """
        self._is_stopping, self._awaits_decision = True, False
        for worker in self._workers:
            if worker.outcome is not None:
                worker.release()
                continue
            worker.process.terminate()
            if worker.ignores_sigterm:
                worker.process.kill()
        deadline = time.monotonic() + TERMINATION_GRACE_SECONDS
        try:
            while any(w.running for w in self._workers) and time.monotonic() < deadline:
                self._selector.wait(RELAY_INTERVAL)
                self._log_relay.relay(self._workers)
                if self._wants_kill:
                    break
        finally:
            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                if not worker.process.join(KILL_SECONDS):
                    print(f"distributor: {worker.origin} cannot be killed.", file=sys.stderr)


def redact(failure: Failure, redaction: Redaction) -> Failure:
    """Return a copy of the failure without secrets."""
    of_text = redaction.of_text
    return replace(failure, summary=of_text(failure.summary), text=of_text(failure.text))


def limit_lingering(workers: Sequence[WorkerHandle], listener: AgentListener) -> None:
    """Report workers that have done their work and do not end; after a while, kill them."""
    now = time.monotonic()
    late: dict[int, WorkerHandle] = {}
    for worker in workers:
        if not worker.running or now <= worker.released_at + LINGERING_WARNING_SECONDS:
            continue
        if now > worker.released_at + LINGERING_KILL_SECONDS:
            worker.process.kill()
        elif not worker.has_lingering_warning:
            worker.has_lingering_warning = True
            late[worker.origin.rank] = worker
    stacks = dump_stacks(late) if late else {}  # of all at once: each may take seconds
    for rank, stack in stacks.items():
        warning = (
            f"distributor: {late[rank].origin} has done its work, but its process is still "
            "running, because of a non-daemon thread, an exit handler or a finalizer. It is "
            f"killed {LINGERING_KILL_SECONDS:.0f} s after the end of its work."
        )
        text = append_stacks(warning, {rank: stack})
        listener.write(rank, "stderr", f"{text}\n".encode())
