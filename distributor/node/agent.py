"""Starts, watches and stops the ranks of one node."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from distributor.errors import RunTimeout, StartTimeout
from distributor.node import leash
from distributor.node.environment import Node, rank_environment
from distributor.node.order import Order, command
from distributor.node.program import Program
from distributor.node.settling import Settling
from distributor.wire.messages import Stream
from distributor.wire.outcome import Failure, Origin, Outcome, Value, death

OUTPUT_INTERVAL = 0.05
"""Seconds between two looks at what the ranks printed."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
CHUNK = 256 * 1024
TAIL_BYTES, TAIL_LINES = 8192, 20


class Sink(Protocol):
    """Where the ranks' output goes."""

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Take bytes that a rank printed."""

    def room(self) -> bool:
        """Tell whether it takes more now; what waits stays in the rank's file."""


@dataclass(eq=False)
class Rank:
    """A rank's process and the anonymous files that tie it to its agent.

    They have no name, so that no kill of any process leaves one behind.
    """

    origin: Origin
    process: subprocess.Popen[bytes]
    watcher: threading.Thread
    leash: socket.socket
    outcome_file: BinaryIO
    printed: dict[Stream, BinaryIO]
    passed_on: dict[Stream, int] = field(default_factory=lambda: {"stdout": 0, "stderr": 0})
    outcome: Outcome | None = None
    may_leave: bool = False

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def signal(self, signum: int) -> None:
        """Signal the rank and all that it started in its process group."""
        if self.running:
            _signal_group(self.process.pid, signum)

    def tail(self) -> str:
        """Give the last lines that the rank printed."""
        ends = [self._end_of(self.printed[stream]) for stream in ("stdout", "stderr")]
        lines = b"".join(ends).decode(errors="backslashreplace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self, keep_value: bool) -> None:
        self.leash.close()
        for file in self.printed.values():
            file.close()
        if not (keep_value and isinstance(self.outcome, Value)):
            self.outcome_file.close()

    @staticmethod
    def _end_of(file: BinaryIO) -> bytes:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))


class Agent:
    """Runs one node's ranks to their end; a context manager that leaves none behind.

    Parameters
    ----------
    node : Node
        The node's share of the run.
    program : Program
        What each rank runs.
    sink : Sink
        Where their output goes.
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
    on_done : callable
        Called once, when every rank of this node has done its work. Rank 0 then still serves
        the store, until `release`.
    """

    def __init__(
        self,
        node: Node,
        program: Program,
        sink: Sink,
        *,
        listener: socket.socket | None = None,
        keep_all: bool = False,
        patience: float = 0.0,
        on_started: Callable[[], object] = lambda: None,
        on_failure: Callable[[Failure], object] = lambda failure: None,
        on_done: Callable[[], object] = lambda: None,
    ) -> None:
        self._node = node
        self._program = program
        self._sink = sink
        self._listener = listener
        self._keep_all = keep_all
        self._on_started = on_started
        self._on_failure = on_failure
        self._on_done = on_done
        self._ranks: list[Rank] = []
        self._failures: list[Failure] = []
        self._settling = Settling(node.ranks_per_node, patience)
        self._to_start = node.ranks_per_node
        self._told_done = False
        self._stopping = False
        self._released = threading.Event()
        self._stop_asked = threading.Event()
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
                self._drain_output()  # it may tell why the run was cut short
        finally:
            for rank in self._ranks:
                rank.watcher.join()
                rank.close(keep_value=kind is None)
            self._selector.close()
            self._wake_end.close()
            self._waker.close()

    def run(self, start_deadline: float = math.inf, deadline: float = math.inf) -> list[Outcome]:
        """Start the ranks and wait until all of them have ended.

        The calling thread is the ranks' parent: where it ends, they are killed.

        Parameters
        ----------
        start_deadline, deadline : float
            When, by ``time.monotonic``, all ranks must have begun and ended their work.

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
        while any(rank.running for rank in self._ranks):
            self._wait()
            self._pass_output_on()
            self._note_ended_processes()
            self._advance(start_deadline, deadline)
        self._drain_output()
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

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._waker.send(b"!")

    # Starting

    def _start_all(self) -> None:
        with tempfile.TemporaryFile() as program_file:
            pickle.dump(self._program, program_file, protocol=5)
            program_file.flush()
            for local_rank in range(self._node.ranks_per_node):
                self._ranks.append(self._start(local_rank, program_file))
        if self._listener is not None:
            self._listener.close()  # rank 0 alone holds it, so that its death frees the port

    def _start(self, local_rank: int, program_file: BinaryIO) -> Rank:
        origin = self._node.origin(local_rank)
        ours, theirs = socket.socketpair()
        files = [tempfile.TemporaryFile() for _ in range(3)]
        outcome, stdout, stderr = files
        first = origin.rank == 0
        order = Order(
            origin=origin,
            parent=os.getpid(),
            leash=theirs.fileno(),
            program=program_file.fileno(),
            outcome=outcome.fileno(),
            listener=self._listener.fileno() if self._listener and first else None,
            keep_value=self._keep_all or first,
        )
        with theirs:
            process = subprocess.Popen(
                command(order),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=order.descriptors(),
                start_new_session=True,
                env=rank_environment(self._node, local_rank, os.environ),
            )
        watcher = threading.Thread(target=self._watch_process, args=(process,), daemon=True)
        watcher.start()
        printed: dict[Stream, BinaryIO] = {"stdout": stdout, "stderr": stderr}
        rank = Rank(origin, process, watcher, ours, outcome, printed)
        self._selector.register(ours, selectors.EVENT_READ, rank)
        return rank

    def _watch_process(self, process: subprocess.Popen[bytes]) -> None:
        if hasattr(os, "waitid"):
            # While it is not reaped its number cannot become another process group's.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        self._wake()

    # Watching

    def _wait(self) -> None:
        for key, _ in self._selector.select(OUTPUT_INTERVAL):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_end.recv(4096)
            else:
                self._read_leash(key.data)

    def _read_leash(self, rank: Rank) -> None:
        report = b""
        with contextlib.suppress(OSError):
            report = rank.leash.recv(1)
        if report == leash.STARTED:
            self._note_start(rank)
        elif report == leash.VALUE:
            rank.outcome = Value(rank.origin.rank, rank.outcome_file)
        elif report == leash.FAILURE:
            rank.outcome_file.seek(0)
            self._note_failure(rank, pickle.load(rank.outcome_file))
        else:
            self._selector.unregister(rank.leash)  # its process ends; how is told by its exit

    def _watched(self) -> list[object]:
        return [key.fileobj for key in self._selector.get_map().values()]

    def _note_ended_processes(self) -> None:
        for rank in self._ranks:
            if not rank.running and rank.outcome is None and not self._stopping:
                self._collect_last_words(rank)
                if rank.outcome is None:
                    self._note_failure(rank, _death_of(rank))

    def _collect_last_words(self, rank: Rank) -> None:
        """Read what a rank reported just before its process ended."""
        rank.leash.setblocking(False)
        while rank.outcome is None and rank.leash in self._watched():
            self._read_leash(rank)

    def _note_start(self, rank: Rank) -> None:
        self._settling.started(rank.origin.rank)
        self._to_start -= 1
        if not self._to_start:
            self._on_started()

    def _note_failure(self, rank: Rank, failure: Failure) -> None:
        if self._stopping:
            return  # we ended it, or what it saw of that: no failure of its own
        rank.outcome = failure
        self._failures.append(failure)
        self._settling.failed(failure)
        self._on_failure(failure)

    def _advance(self, start_deadline: float, deadline: float) -> None:
        """Take the step that what was noted asks for: let ranks leave, or stop them."""
        now = time.monotonic()
        if now >= deadline:
            raise RunTimeout(f"The run was stopped at its timeout. {self._busy()}")
        if now >= start_deadline and self._to_start and not self._failures:
            raise StartTimeout(f"Not all ranks began within start_timeout. {self._busy()}")
        if self._stop_asked.is_set() or self._settling.over():
            self._end_all()
        self._let_leave()
        if not self._told_done and self._work_is_done():
            self._told_done = True
            self._on_done()

    def _let_leave(self) -> None:
        for rank in self._ranks:
            serves_others = rank.origin.rank == 0 and isinstance(rank.outcome, Value)
            if rank.may_leave or rank.outcome is None:
                continue
            if self._released.is_set() or not serves_others:
                rank.may_leave = True
                with contextlib.suppress(OSError):  # it has left already
                    rank.leash.send(leash.RELEASE)

    def _work_is_done(self) -> bool:
        """Tell whether all ranks have ended with a value, but for rank 0, which may linger."""
        return all(
            isinstance(rank.outcome, Value) and (rank.origin.rank == 0 or not rank.running)
            for rank in self._ranks
        )

    def _busy(self) -> str:
        busy = [str(rank.origin) for rank in self._ranks if rank.outcome is None]
        return f"Still busy: {'; '.join(busy) or 'no rank'}."

    # Stopping

    def _end_all(self) -> None:
        """Stop what still runs: SIGTERM, a grace period, SIGKILL to each process group."""
        self._stopping = True
        for rank in self._ranks:
            rank.signal(signal.SIGTERM)
        try:
            self._await_exits(GRACE)
        finally:
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)
            for rank in self._ranks:
                rank.watcher.join()  # which reaps the process

    def _await_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(rank.running for rank in self._ranks) and time.monotonic() < deadline:
            self._wait()
            self._pass_output_on()

    # Output

    def _pass_output_on(self) -> bool:
        """Hand on what the ranks printed since the last time; tell whether there was any."""
        moved = False
        for rank, stream, file in self._files():
            if not self._sink.room():
                break
            data = os.pread(file.fileno(), CHUNK, rank.passed_on[stream])
            if data:
                moved = True
                rank.passed_on[stream] += len(data)
                self._sink.write(rank.origin.rank, stream, data)
        return moved

    def _drain_output(self) -> None:
        deadline = time.monotonic() + GRACE
        while self._unread() and (self._pass_output_on() or time.monotonic() < deadline):
            pass

    def _unread(self) -> bool:
        return any(
            os.fstat(file.fileno()).st_size > rank.passed_on[stream]
            for rank, stream, file in self._files()
        )

    def _files(self) -> Iterator[tuple[Rank, Stream, BinaryIO]]:
        for rank in self._ranks:
            for stream, file in rank.printed.items():
                yield rank, stream, file


def _death_of(rank: Rank) -> Failure:
    code = rank.process.returncode
    if code < 0:
        return death(rank.origin, signum=-code, tail=rank.tail())
    return death(rank.origin, exit_code=code, tail=rank.tail())


def _signal_group(leader: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)
