"""Starts, watches and stops the ranks of one node."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO, NoReturn

from distributor.core.mlflow_env import RUN_ID
from distributor.core.redaction import Redaction
from distributor.errors import RunTimeout, StartTimeout
from distributor.node.agent.failure_grace import FailureGracePeriod
from distributor.node.agent.log_relay import LogRelay
from distributor.node.agent.node_spec import NodeSpec
from distributor.node.agent.sink import Sink
from distributor.node.agent.system_metrics import SystemMetrics
from distributor.node.agent.worker_env import rank_environment
from distributor.node.agent.worker_handle import Rank
from distributor.node.process.scratch import new_scratch_path
from distributor.node.process.spawner import Spawner
from distributor.node.process.worker_spec import WorkerSpec
from distributor.node.worker import control_channel
from distributor.node.worker.stack_dump import append_stacks, dump_stacks
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Failure, Outcome, Value, death
from distributor.wire.messages import Source

OUTPUT_INTERVAL = 0.05
"""Seconds between two looks at what the ranks printed."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
TELL_SECONDS, LEAVE_SECONDS = 30.0, 600.0
"""Seconds that a rank whose work is done may take to end: until it is told of, and killed."""
KILL_SECONDS = 30.0
"""Seconds from SIGKILL after which a process is left alone: it hangs in the kernel."""


class Agent:
    """Runs one node's ranks to their end; a context manager that leaves none behind.

    Parameters
    ----------
    node : NodeSpec
        The node's share of the run.
    program : BinaryIO
        A file with the `Program` that each rank runs.
    sink : Sink
        Where their output goes.
    starter : Starter
        How their processes are started.
    listener : socket, optional
        The bound socket for the rendezvous store, on the node that has rank 0.
    keep_all : bool
        Whether every rank's value is wanted, or rank 0's alone.
    patience : float
        Seconds that the driver has to decide on a failure before the agent does.
    on_started : callable
        Called once, when every rank of this node begins its work.
    on_failure : callable
        Called with each failure as it is known.
    on_stacks : callable
        Called with the stacks of the ranks at work, by rank, when those were asked for.
    on_done : callable
        Called once, when every rank of this node has done its work. Rank 0 then still serves
        the store, until `release`.
    on_heeded : callable
        Called when a rank wants to be told that the run is about to lose a process.
    on_asked : callable
        Called when such a rank was asked to end.
    """

    def __init__(
        self,
        node: NodeSpec,
        program: BinaryIO,
        sink: Sink,
        starter: Spawner,
        *,
        listener: socket.socket | None = None,
        keep_all: bool = False,
        patience: float = 0.0,
        on_started: Callable[[], object] = lambda: None,
        on_failure: Callable[[Failure], object] = lambda failure: None,
        on_stacks: Callable[[dict[int, str]], object] = lambda stacks: None,
        on_done: Callable[[], object] = lambda: None,
        on_subscribed: Callable[[], object] = lambda: None,
        on_sigterm: Callable[[], object] = lambda: None,
    ) -> None:
        self._node = node
        self._program = program
        self._sink = sink
        self._starter = starter
        self._listener = listener
        self._keep_all = keep_all
        self._on_started = on_started
        self._on_failure = on_failure
        self._on_stacks = on_stacks
        self._on_done = on_done
        self._on_subscribed = on_subscribed
        self._on_sigterm = on_sigterm
        self._ranks: list[Rank] = []
        self._failures: list[Failure] = []
        self._grace_period = FailureGracePeriod(node.ranks_per_node, patience)
        self._redaction = Redaction(node.env)
        usage = SystemMetrics(node.name) if RUN_ID in node.env else None
        self._output = LogRelay(self._ranks, sink, self._redaction, usage)
        self._to_start = node.ranks_per_node
        self._started_at = math.inf
        self._told_done = False
        self._stopping = False
        self._released = threading.Event()
        self._stop_asked = threading.Event()
        self._stacks_asked = threading.Event()
        self._notices: deque[bytes] = deque()
        self._wake_end, self._waker = socket.socketpair()
        self._wake_end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_end, selectors.EVENT_READ)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self._end_all()
            if kind is not None and issubclass(kind, Exception):
                self._output.drain()  # it may tell why the run was cut short
        finally:
            for rank in self._ranks:
                rank.close(keep_value=kind is None)
            self._selector.close()
            self._wake_end.close()
            self._waker.close()

    def run(self, start_deadline: float = math.inf, timeout: float = math.inf) -> list[Outcome]:
        """Start the ranks and wait until all of them have ended.

        The calling thread may be the ranks' parent: where it ends, they are killed.

        Parameters
        ----------
        start_deadline : float
            When, by ``time.monotonic``, all ranks must have begun their work.
        timeout : float
            Seconds from then in which all must have done it.

        Returns
        -------
        list of Outcome
            Of each rank that ended by itself, failures in the order in which they came; a rank
            that was stopped because another failed is not in it.

        Raises
        ------
        StartTimeout, RunTimeout
            Where a deadline passed.
        """
        self._start_all()
        behind = False
        while any(rank.running for rank in self._ranks):
            self._wait(0.0 if behind else OUTPUT_INTERVAL)
            behind = self._output.pass_on()
            self._output.tell_usage()
            self._note_ended_processes()
            self._advance(start_deadline, timeout)
        self._note_ended_processes()  # of those that ended since the last look
        self._output.drain()
        values = [rank.outcome for rank in self._ranks if isinstance(rank.outcome, Value)]
        return [*self._failures, *values]

    def release(self) -> None:
        """Let rank 0 leave: all ranks of all nodes have done their work. From any thread."""
        self._released.set()
        self._wake()

    def stop(self) -> None:
        """Stop the ranks: the run failed elsewhere. From any thread."""
        self._stop_asked.set()
        self._wake()

    def ask_for_stacks(self) -> None:
        """Have ``on_stacks`` called soon. From any thread."""
        self._stacks_asked.set()
        self._wake()

    def give_notice(self) -> None:
        """Tell the ranks that the run is about to lose a process. From any thread."""
        self._notices.append(control_channel.NOTICE)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._waker.send(b"!")

    # Starting

    def _start_all(self) -> None:
        for local_rank in range(self._node.ranks_per_node):
            self._ranks.append(self._start(local_rank))
        if self._listener is not None:
            self._listener.close()  # rank 0 alone holds it, so that its death frees the port

    def _start(self, local_rank: int) -> Rank:
        origin = self._node.origin(local_rank)
        ours, theirs = socket.socketpair()
        outcome, answers, progress = anonymous_file(), anonymous_file(), anonymous_file()
        stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        first = origin.rank == 0
        scratch = new_scratch_path()
        worker_spec = WorkerSpec(
            origin=origin,
            parent=os.getpid(),
            control=theirs.fileno(),
            program=self._program.fileno(),
            outcome=outcome.fileno(),
            stacks=answers.fileno(),
            progress=progress.fileno(),
            listener=self._listener.fileno() if self._listener and first else None,
            scratch=scratch,
            keep_value=self._keep_all or first,
            modules=self._node.modules,
            program_name=self._node.program_name,
            run_id=self._node.run_id,
        )
        environment = rank_environment(self._node, local_rank, os.environ)
        with theirs:
            process = self._starter.start(worker_spec, environment, stdout, stderr, self._wake)
        told: dict[Source, BinaryIO] = {
            "stdout": stdout,
            "stderr": stderr,
            "progress": progress,
        }
        rank = Rank(origin, process, ours, outcome, answers, told, scratch)
        self._selector.register(ours, selectors.EVENT_READ, rank)
        return rank

    # Watching

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_end.recv(4096)
            else:
                self._read_control(key.data)

    def _read_control(self, rank: Rank) -> None:
        word = b""
        with contextlib.suppress(OSError):
            word = rank.control.recv(1)
        _HANDLERS.get(word, Agent._note_silence)(self, rank)

    def _note_silence(self, rank: Rank) -> None:
        self._selector.unregister(rank.control)  # its process ends; how is told by its exit

    def _watched(self) -> list[object]:
        return [key.fileobj for key in self._selector.get_map().values()]

    def _note_ended_processes(self) -> None:
        for rank in self._ranks:
            if not rank.running and rank.outcome is None and not self._stopping:
                self._collect_last_words(rank)
                if rank.outcome is None:
                    self._note_failure(rank, self._death_of(rank))

    def _collect_last_words(self, rank: Rank) -> None:
        """Read what a rank reported just before its process ended."""
        rank.control.setblocking(False)
        while rank.outcome is None and rank.control in self._watched():
            self._read_control(rank)

    def _death_of(self, rank: Rank) -> Failure:
        code = rank.process.returncode
        assert code is not None, "it has ended"
        if code < 0:
            return death(rank.origin, signum=-code, tail=self._tail_of(rank))
        return self._exit_of(rank, code)

    def _exit_of(self, rank: Rank, code: int) -> Failure:
        return death(rank.origin, exit_code=code, tail=self._tail_of(rank))

    def _tail_of(self, rank: Rank) -> str:
        return self._redaction.of_text(rank.tail())

    def _note_start(self, rank: Rank) -> None:
        self._grace_period.started(rank.origin.rank)
        self._to_start -= 1
        if not self._to_start:
            self._started_at = time.monotonic()
            self._on_started()

    def _note_value(self, rank: Rank) -> None:
        rank.outcome = Value(rank.origin.rank, rank.outcome_file)

    def _note_exit(self, rank: Rank) -> None:
        self._note_failure(rank, self._exit_of(rank, rank.control.recv(1)[0]))

    def _note_exception(self, rank: Rank) -> None:
        rank.outcome_file.seek(0)
        self._note_failure(rank, pickle.load(rank.outcome_file))

    def _note_sigterm(self, rank: Rank) -> None:
        if not self._stopping:
            self._on_sigterm()

    def _note_ignores_sigterm(self, rank: Rank) -> None:
        rank.ignores_sigterm = True

    def _note_failure(self, rank: Rank, failure: Failure) -> None:
        if self._stopping:
            return  # we ended it, or what it saw of that: no failure of its own
        failure = replace(
            failure,
            summary=self._redaction.of_text(failure.summary),
            text=self._redaction.of_text(failure.text),
        )
        rank.outcome = failure
        self._failures.append(failure)
        self._grace_period.failed(failure)
        self._on_failure(failure)

    def _advance(self, start_deadline: float, timeout: float) -> None:
        """Take the step that what was noted asks for: let ranks leave, or stop them."""
        now = time.monotonic()
        if now >= self._started_at + timeout:
            self._give_up(RunTimeout, "The run was stopped at its timeout.")
        if now >= start_deadline and self._to_start and not self._failures:
            self._give_up(StartTimeout, "Not all ranks began within start_timeout.")
        if self._stacks_asked.is_set():
            self._stacks_asked.clear()
            self._on_stacks(self._stacks())
        while self._notices:
            notice = self._notices.popleft()
            for rank in self._ranks:
                rank.tell(notice)
        if self._stop_asked.is_set() or self._grace_period.over():
            self._end_all()
        self._let_leave()
        self._hurry_leavers(now)
        if not self._told_done and self._work_is_done():
            self._told_done = True
            self._on_done()

    def _let_leave(self) -> None:
        for rank in self._ranks:
            serves_others = rank.origin.rank == 0 and isinstance(rank.outcome, Value)
            if rank.outcome is not None and (self._released.is_set() or not serves_others):
                rank.let_leave()

    def _hurry_leavers(self, now: float) -> None:
        """Tell of ranks that have done their work and do not end; after a while, end them."""
        for rank in self._ranks:
            if rank.running and now > rank.leaves_since + LEAVE_SECONDS:
                rank.process.kill()
            elif rank.running and not rank.told_of and now > rank.leaves_since + TELL_SECONDS:
                rank.told_of = True
                why = (
                    f"distributor: {rank.origin} has done its work, but its process goes on: a "
                    f"thread that is no daemon, or an exit handler. It has {LEAVE_SECONDS:.0f} s."
                )
                told = append_stacks(why, dump_stacks({rank.origin.rank: rank}))
                self._sink.write(rank.origin.rank, "stderr", f"{told}\n".encode())

    def _work_is_done(self) -> bool:
        """Tell whether all ranks have ended with a value, but for rank 0, which may linger."""
        return all(
            isinstance(rank.outcome, Value) and (rank.origin.rank == 0 or not rank.running)
            for rank in self._ranks
        )

    def _give_up(self, kind: type[RunTimeout] | type[StartTimeout], why: str) -> NoReturn:
        stacks = self._stacks()
        raise kind(append_stacks(f"{why} {self._busy()}", stacks), stacks=stacks)

    def _stacks(self) -> dict[int, str]:
        """Find out where the ranks stand that are still at work."""
        busy = {r.origin.rank: r for r in self._ranks if r.running and r.outcome is None}
        return dump_stacks(busy)

    def _busy(self) -> str:
        busy = [str(rank.origin) for rank in self._ranks if rank.outcome is None]
        return f"Still busy: {'; '.join(busy) or 'no rank'}."

    # Stopping

    def _end_all(self) -> None:
        """Stop what still runs: SIGTERM to each process group, a grace period, SIGKILL.

        A rank whose outcome is known is leaving: it has the grace period for its exit handlers.
        """
        self._stopping = True
        for rank in self._ranks:
            if rank.outcome is None:
                rank.process.terminate()
                if rank.ignores_sigterm:
                    rank.process.kill()
            else:
                rank.let_leave()
        try:
            self._await_exits(GRACE)
        finally:
            for rank in self._ranks:
                rank.process.kill()
            for rank in self._ranks:
                if not rank.process.join(KILL_SECONDS):
                    print(f"distributor: {rank.origin} cannot be killed.", file=sys.stderr)

    def _await_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(rank.running for rank in self._ranks) and time.monotonic() < deadline:
            self._wait(OUTPUT_INTERVAL)
            self._output.pass_on()


_HANDLERS: dict[bytes, Callable[[Agent, Rank], object]] = {
    control_channel.STARTED: Agent._note_start,
    control_channel.VALUE: Agent._note_value,
    control_channel.FAILURE: Agent._note_exception,
    control_channel.EXIT: Agent._note_exit,
    control_channel.SUBSCRIBED: lambda agent, rank: agent._on_subscribed(),
    control_channel.IGNORES_SIGTERM: Agent._note_ignores_sigterm,
    control_channel.SIGTERM_RECEIVED: Agent._note_sigterm,
}
