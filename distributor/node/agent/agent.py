"""Starts, watches and stops the ranks of one node."""

from __future__ import annotations

import math
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO, NoReturn

from distributor.core.rank_variables import RUN_ID
from distributor.core.text import Redaction
from distributor.errors import RunTimeout, StartTimeout
from distributor.node.agent import termination
from distributor.node.agent.activity import ActivityMonitor
from distributor.node.agent.output import AgentListener, LogRelay
from distributor.node.agent.system_metrics import SystemMetrics, has_host_usage
from distributor.node.agent.termination import failure_at_exit, redact
from distributor.node.agent.worker_handle import RankStarter, WorkerHandle, WorkerSelector
from distributor.node.process.spawner import Spawner
from distributor.node.process.specs import NodeShare
from distributor.node.worker.stacks import append_stacks, dump_stacks
from distributor.policies import FailureGracePeriod
from distributor.rank import messages
from distributor.serialization.outcome import Failure, Outcome, Value

RELAY_INTERVAL = 0.05
"""Seconds between two reads of what the ranks printed."""


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
        self._listener = listener
        self._store_socket = store_socket
        self._workers: list[WorkerHandle] = []
        self._selector = WorkerSelector(self._handle)
        wake = self._selector.wake
        self._starter = RankStarter(node, program, spawner, store_socket, data, wake)
        self._failures: list[Failure] = []
        self._grace_period = FailureGracePeriod(node.ranks_per_node)
        self._head_start = head_start
        self._redaction = Redaction(node.env)
        has_metrics = RUN_ID in node.env and has_host_usage()
        system_metrics = SystemMetrics(node.name) if has_metrics else None
        self._log_relay = LogRelay(self._workers, listener, self._redaction, system_metrics)
        self._activity = ActivityMonitor(
            self._workers, listener, node.activity_interval, uses_gpus=node.uses_gpus
        )
        self._num_starting = node.ranks_per_node
        self._all_started_at = math.inf
        self._has_reported_done = self._is_stopping = False
        self._release_requested = threading.Event()
        self._stop_requested = threading.Event()
        self._kill_requested = threading.Event()
        self._stacks_requested = threading.Event()
        self._notices: deque[bytes] = deque()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self._stop_all()
            if kind is not None and issubclass(kind, Exception):
                self._log_relay.drain()  # the output may show why the run was cut short
        finally:
            for worker in self._workers:
                worker.close(keep_value=kind is None)
            self._selector.close()

    def run(self, start_deadline: float = math.inf, timeout: float = math.inf) -> list[Outcome]:
        """Start the ranks and wait until all of them have ended.

        The calling thread may become the parent of the ranks: they are killed when it ends.
        """
        for local_rank in range(self._node.ranks_per_node):
            worker = self._starter.start(local_rank)
            self._workers.append(worker)
            self._selector.add(worker)
        if self._store_socket is not None:
            self._store_socket.close()  # rank 0 alone holds it, so that its death frees the port
        has_more_output = False
        while any(worker.running for worker in self._workers):
            self._selector.wait(0.0 if has_more_output else RELAY_INTERVAL)
            has_more_output = self._log_relay.relay()
            self._log_relay.report_system_metrics()
            self._note_exits()
            self._check_deadlines(start_deadline, timeout)
            self._activity.report_idleness()
            self._answer_requests()
            self._release_or_stop()
            self._report_work_done()
        self._note_exits()  # of processes that ended after the last check
        self._report_work_done()
        self._log_relay.drain()
        values = [worker.outcome for worker in self._workers if isinstance(worker.outcome, Value)]
        return [*self._failures, *values]

    # Requests, from any thread

    def release(self) -> None:
        """Let rank 0 end, because all ranks of all nodes have done their work. From any thread."""
        self._release_requested.set()
        self._selector.wake()

    def stop(self) -> None:
        """Stop the ranks, because the run has failed elsewhere or is cancelled. From any thread."""
        self._stop_requested.set()
        self._selector.wake()

    def kill(self) -> None:
        """Stop the ranks without a grace period. From any thread."""
        self._kill_requested.set()
        self.stop()

    def request_stacks(self) -> None:
        """Have the listener's `on_stacks` called soon. From any thread."""
        self._stacks_requested.set()
        self._selector.wake()

    def notify_preemption(self, here: bool) -> None:
        """Notify the ranks that a process is about to end, here or elsewhere. From any thread."""
        notice = messages.NOTICE_HERE if here else messages.NOTICE
        self._notices.append(notice)  # ranks count them: each one is sent
        self._selector.wake()

    # Events of workers

    def _handle(self, worker: WorkerHandle, message: bytes) -> None:
        if handler := _HANDLERS.get(message):
            handler(self, worker)

    def _note_start(self, worker: WorkerHandle) -> None:
        self._grace_period.note_start(worker.origin.rank, time.monotonic())
        self._num_starting -= 1
        if not self._num_starting:
            self._all_started_at = time.monotonic()
            self._activity.start()
            self._listener.on_ranks_started()

    def _note_value(self, worker: WorkerHandle) -> None:
        worker.outcome = Value(worker.origin.rank, worker.outcome_file)

    def _note_exception(self, worker: WorkerHandle) -> None:
        worker.outcome_file.seek(0)
        self._note_failure(worker, pickle.load(worker.outcome_file))

    def _note_exit_code(self, worker: WorkerHandle) -> None:
        exit_code = worker.control.recv(1)[0]
        self._note_failure(worker, failure_at_exit(worker, exit_code, self._redaction))

    def _note_subscription(self, worker: WorkerHandle) -> None:
        self._listener.on_preemption_subscribed()

    def _note_ignores_sigterm(self, worker: WorkerHandle) -> None:
        worker.ignores_sigterm = True

    def _note_sigterm(self, worker: WorkerHandle) -> None:
        if not self._is_stopping:
            self._listener.on_sigterm()

    def _note_exits(self) -> None:
        """Find the processes that ended without an outcome."""
        for worker in self._workers:
            if not worker.running and worker.outcome is None and not self._is_stopping:
                self._selector.read_rest(worker)
                if worker.outcome is None:
                    returncode = worker.process.returncode
                    assert returncode is not None, "the process has ended"
                    self._note_failure(worker, failure_at_exit(worker, returncode, self._redaction))

    def _note_failure(self, worker: WorkerHandle, failure: Failure) -> None:
        if self._is_stopping:
            return  # the failure is a consequence of the stop
        failure = redact(failure, self._redaction)
        worker.outcome = failure
        self._failures.append(failure)
        self._grace_period.note_failure(failure, time.monotonic())
        self._listener.on_rank_failed(failure)

    # What follows from events, requests and the time

    def _check_deadlines(self, start_deadline: float, timeout: float) -> None:
        now = time.monotonic()
        if now >= self._all_started_at + timeout:
            self._raise_timeout(RunTimeout, "The run was stopped at its timeout.")
        if now >= start_deadline and self._num_starting and not self._failures:
            self._raise_timeout(StartTimeout, "Not all ranks began within start_timeout.")

    def _raise_timeout(self, kind: type[RunTimeout] | type[StartTimeout], reason: str) -> NoReturn:
        stacks = self._stacks()
        busy = [str(worker.origin) for worker in self._workers if worker.working]
        text = f"{reason} Still busy: {'; '.join(busy) or 'no rank'}."
        raise kind(append_stacks(text, stacks), stacks=stacks)

    def _answer_requests(self) -> None:
        if self._stacks_requested.is_set():
            self._stacks_requested.clear()
            self._listener.on_stacks(self._stacks())
        while self._notices:
            notice = self._notices.popleft()
            for worker in self._workers:
                worker.send(notice)

    def _stacks(self) -> dict[int, str]:
        """Return the stacks of the ranks that have no outcome yet."""
        stacks = dump_stacks({w.origin.rank: w for w in self._workers if w.working})
        self._activity.disregard_latest()  # to write them takes CPU time
        return stacks

    def _release_or_stop(self) -> None:
        is_over = self._grace_period.is_over(time.monotonic() - self._head_start)
        if self._stop_requested.is_set() or is_over:
            self._stop_all()
        termination.release_finished(self._workers, run_is_done=self._release_requested.is_set())
        termination.limit_lingering(self._workers, self._listener)

    def _report_work_done(self) -> None:
        if not self._has_reported_done and termination.all_have_values(self._workers):
            self._has_reported_done = True
            self._listener.on_work_done()

    def _stop_all(self) -> None:
        self._is_stopping = True
        termination.terminate(self._workers, self._wait_while_stopping)

    def _wait_while_stopping(self) -> bool:
        self._selector.wait(RELAY_INTERVAL)
        self._log_relay.relay()
        return not self._kill_requested.is_set()


_HANDLERS: dict[bytes, Callable[[Agent, WorkerHandle], object]] = {
    messages.STARTED: Agent._note_start,
    messages.VALUE: Agent._note_value,
    messages.FAILURE: Agent._note_exception,
    messages.EXIT: Agent._note_exit_code,
    messages.SUBSCRIBED: Agent._note_subscription,
    messages.IGNORES_SIGTERM: Agent._note_ignores_sigterm,
    messages.SIGTERM_RECEIVED: Agent._note_sigterm,
}
