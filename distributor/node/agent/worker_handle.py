"""The agent's handle of a worker: its process, its files and its control channel."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from distributor.core.files import new_scratch_path, remove_scratch
from distributor.core.resources import local_folder
from distributor.node.agent.worker_env import rank_environment
from distributor.node.process.specs import NodeShare, Role, WorkerSpec
from distributor.node.process.supervisor import Process, Spawner
from distributor.rank import messages
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Origin, Outcome, Value
from distributor.wire.messages import Source, Stream


class WorkerSelector:
    """Reads the control channels of a node's workers on the agent's thread.

    Parameters
    ----------
    on_message : callable
        Called with the worker and the one byte that names its message. It reads the rest of the
        message, if there is one, from the worker's control channel.
    """

    def __init__(self, on_message: Callable[[WorkerHandle, bytes], object]) -> None:
        self._on_message = on_message
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def add(self, worker: WorkerHandle) -> None:
        """Read this worker's control channel from now on."""
        self._selector.register(worker.control, selectors.EVENT_READ, worker)

    def remove(self, worker: WorkerHandle) -> None:
        """Read it no longer."""
        if worker.control in self._selector.get_map():
            self._selector.unregister(worker.control)

    def wake(self) -> None:
        """End the current or the next `wait` at once. From any thread."""
        with contextlib.suppress(OSError):  # the agent has ended
            self._wake_sender.send(b"!")

    def wait(self, seconds: float) -> None:
        """Wait for messages, `wake` or the end of the time, and handle the messages."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
            else:
                self._read(key.data)

    def read_rest(self, worker: WorkerHandle) -> None:
        """Handle what a worker, whose process has ended, sent last; stop at its outcome."""
        worker.control.setblocking(False)
        while worker.outcome is None and worker.control in self._selector.get_map():
            self._read(worker)

    def close(self) -> None:
        """Close the selector; the workers' control channels stay open."""
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _read(self, worker: WorkerHandle) -> None:
        message = b""
        with contextlib.suppress(OSError):
            message = worker.control.recv(1)
        if message:
            self._on_message(worker, message)
        else:
            self._selector.unregister(worker.control)  # its exit code will show how it ended


STANDARD_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
TAIL_BYTES, TAIL_LINES = 8192, 40


@dataclass(eq=False)
class WorkerHandle:
    """A rank's process, and the anonymous files that it shares with its agent.

    The files have no name, so that no killed process leaves one behind.

    Attributes
    ----------
    origin : Origin
        Which rank it is, and on which host.
    process : Process
        Its process.
    control : socket
        The agent's end of its control channel.
    outcome_file, answers : BinaryIO
        The files with its outcome, and with the stacks that it was asked for.
    counters : BinaryIO or None
        The memory in which it counts its steps.
    output_files : dict of str to BinaryIO
        The files into which it writes what it prints and reports.
    scratch : str
        Its scratch folder, which the agent removes.
    relayed : Counter
        How many bytes of each of the output files the sink has received.
    outcome : Value, Failure or None
        Its outcome, as soon as that is known.
    ignores_sigterm : bool
        Whether SIGTERM alone does not end it, because it subscribes to preemption notices.
    ended_at : float
        When, by ``time.monotonic``, it had an outcome; infinite before that.
    released_at : float
        When, by ``time.monotonic``, it was allowed to end; infinite before that.
    has_lingering_warning : bool
        Whether the user was warned that it does not end.
    """

    origin: Origin
    process: Process
    control: socket.socket
    outcome_file: BinaryIO
    answers: BinaryIO
    counters: BinaryIO | None
    output_files: dict[Source, BinaryIO]
    scratch: str
    relayed: Counter[Source] = field(default_factory=Counter)
    outcome: Outcome | None = None
    ignores_sigterm: bool = False
    ended_at: float = math.inf
    released_at: float = math.inf
    has_lingering_warning: bool = False

    @property
    def running(self) -> bool:
        return self.process.running

    @property
    def working(self) -> bool:
        """Whether the process runs and has no outcome yet."""
        return self.running and self.outcome is None

    @property
    def pid(self) -> int:
        return self.process.pid

    def settle(self, outcome: Outcome) -> None:
        """Note its outcome."""
        self.outcome, self.ended_at = outcome, time.monotonic()

    def release(self) -> None:
        """Let the worker end, because no other rank needs it any longer."""
        if self.released_at == math.inf:
            self.released_at = time.monotonic()
            self.send(messages.RELEASE)

    def send(self, message: bytes) -> None:
        """Send a message over the control channel, if the worker can receive it."""
        with contextlib.suppress(OSError):  # it has ended, or is stopped and its buffer is full
            self.control.send(message, socket.MSG_DONTWAIT)

    def tail(self) -> str:
        """Return the last lines that the worker printed."""
        ends = [_end_of(self.output_files[stream]) for stream in STANDARD_STREAMS]
        lines = b"".join(ends).decode(errors="backslashreplace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self, keep_value: bool) -> None:
        """Close the files and the control channel."""
        remove_scratch(self.scratch)
        self.control.close()
        for file in (self.answers, self.counters, *self.output_files.values()):
            if file is not None:
                file.close()
        if not (keep_value and isinstance(self.outcome, Value)):
            self.outcome_file.close()


def _end_of(file: BinaryIO) -> bytes:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))


def start_worker(
    node: NodeShare,
    local_rank: int,
    program: BinaryIO,
    spawner: Spawner,
    *,
    store_socket: socket.socket | None = None,
    data: BinaryIO | None = None,
    on_exit: Callable[[], object],
    role: Role = "rank",
    former: int = 0,
) -> WorkerHandle:
    """Start the node's rank number `local_rank`.

    Parameters
    ----------
    node : NodeShare
        The node's share of the run.
    local_rank : int
        The rank's number on the node.
    program : BinaryIO
        A file with the `Program` that each rank runs.
    spawner : Spawner
        Starts the process.
    store_socket : socket, optional
        The bound socket for the rendezvous store, on the node that has rank 0.
    data : BinaryIO, optional
        A file with the node's part of the run's datasets.
    on_exit : callable
        Called once when the process has ended, on any thread.
    role : str, default "rank"
        What the process is.
    former : int, default 0
        The process id of the rank that it replaces.
    """
    serves = role == "store" if node.goes_on else node.origin(local_rank).rank == 0
    origin, folder = node.origin(local_rank), local_folder()
    with contextlib.ExitStack() as opened:
        ours, theirs = map(opened.enter_context, socket.socketpair())
        ours.sendall(node.secret)
        outcome, answers, progress = (opened.enter_context(anonymous_file()) for _ in range(3))
        counters = opened.enter_context(anonymous_file()) if node.settings.step_times else None
        stdout, stderr = (
            opened.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(2)
        )
        worker_spec = WorkerSpec(
            share=node.without_secrets(),
            local_rank=local_rank,
            role=role,
            former=former,
            parent=os.getpid(),
            control=theirs.fileno(),
            program=program.fileno(),
            outcome=outcome.fileno(),
            stacks=answers.fileno(),
            progress=progress.fileno(),
            counters=counters.fileno() if counters else None,
            listener=store_socket.fileno() if store_socket and serves else None,
            data=data.fileno() if data else None,
            scratch=new_scratch_path(),
        )
        environment = rank_environment(node, local_rank, os.environ)
        with theirs:
            process = spawner.start(worker_spec, environment, stdout, stderr, on_exit)
        opened.pop_all()  # the worker closes them
    files: dict[Source, BinaryIO] = {"stdout": stdout, "stderr": stderr, "progress": progress}
    scratch = worker_spec.scratch
    return WorkerHandle(origin, process, ours, outcome, answers, counters, files, scratch)
