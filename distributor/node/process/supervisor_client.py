"""The agent's side of a supervisor, which starts the ranks of one run."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import BinaryIO, NamedTuple

from distributor.core.host import host_name
from distributor.core.kernel import lacking_for_supervision
from distributor.errors import DistributorError, StartTimeout
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.ipc import (
    RankEnded,
    RankStarted,
    Ready,
    Refused,
    StartRank,
    await_message,
    receive,
)
from distributor.node.process.process_attributes import ProcessAttributes
from distributor.node.process.signals import kill_by_environment, kill_group
from distributor.node.process.spawner import RUN_VARIABLES, Process
from distributor.node.process.start_limit import StartLimit
from distributor.node.process.worker_spec import WorkerSpec
from distributor.serialization.oob_pickle import anonymous_file

READY_SECONDS = 60.0
"""Seconds that a new interpreter has to become a supervisor, which imports little."""
SHUTDOWN_SECONDS = 10.0
"""Seconds that a supervisor has to end all its descendants before it is killed."""


def is_supported() -> bool:
    """Return whether this system has what supervisors and zygotes need, as macOS has not."""
    return not lacking_for_supervision()


class SupervisorConnection(NamedTuple):
    """The connection to a supervisor that is ready, and the supervisor's process id."""

    connection: socket.socket
    pid: int


def start_supervisor(interpreter: Interpreter, limit: StartLimit) -> SupervisorConnection:
    """Start a supervisor whose ranks each get a new interpreter of the same kind.

    Parameters
    ----------
    interpreter : Interpreter
        The interpreter.
    limit : StartLimit
        How long it is waited for.

    Raises
    ------
    DistributorError
        If the interpreter does not start or does not become a supervisor.
    StartTimeout
        If the deadline has passed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {**os.environ, **interpreter.variables}
        number = theirs.fileno()
        pid = interpreter.start_detached("supervisor", str(number), number, environment)
    deadline = min(limit.deadline, time.monotonic() + READY_SECONDS)
    try:
        reply = await_message(ours, replace(limit, deadline=deadline))
    except BaseException as error:
        kill(pid)
        ours.close()
        if not isinstance(error, TimeoutError):
            raise
        if deadline < limit.deadline:
            raise DistributorError(
                f"{interpreter.executable} on {host_name()} has not become the supervisor of ranks "
                f"within {READY_SECONDS:.0f} s."
            ) from None
        raise StartTimeout(
            f"start_timeout has passed, and {interpreter.executable} on {host_name()}, which is to "
            "start the ranks, is not ready."
        ) from None
    if not isinstance(reply, Ready):
        raise DistributorError(
            f"{interpreter.executable} could not be started as the supervisor of ranks."
        )
    return SupervisorConnection(ours, pid)


def kill(pid: int) -> None:
    """Kill a process that this user has started, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class SupervisedSpawner:
    """Has a supervisor start each rank.

    Parameters
    ----------
    supervisor : SupervisorConnection
        The supervisor.
    limit : StartLimit
        How long its answers are waited for.
    """

    def __init__(self, supervisor: SupervisorConnection, limit: StartLimit) -> None:
        self._connection, self._supervisor_pid = supervisor
        self._limit = limit
        self._attributes = ProcessAttributes.current()
        self._processes: dict[int, Process] = {}
        self._replies: queue.SimpleQueue[RankStarted | Refused] = queue.SimpleQueue()
        self._on_end: Callable[[], object] = lambda: None
        self._run_variables: dict[str, str] = {}
        self._reader = threading.Thread(target=self._read, name="supervisor-reader", daemon=True)

    def __enter__(self) -> SupervisedSpawner:
        self._reader.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._reader.join(SHUTDOWN_SECONDS)
        if self._reader.is_alive():  # the supervisor hangs or was stopped
            kill(self._supervisor_pid)
            self._reader.join()
        self._connection.close()

    def start(
        self,
        worker_spec: WorkerSpec,
        environment: Mapping[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
        on_end: Callable[[], object],
    ) -> Process:
        self._on_end = on_end
        self._run_variables = {name: environment[name] for name in RUN_VARIABLES}
        self._send_request(worker_spec, environment, stdout, stderr)
        try:
            reply = self._next_reply()
        except BaseException:
            kill(self._supervisor_pid)  # it would not end the ranks that it has started
            raise
        if isinstance(reply, Refused):
            raise DistributorError(f"A rank could not be started: {reply.reason}")
        return self._processes[reply.pid]

    def _next_reply(self) -> RankStarted | Refused:
        for seconds in self._limit.intervals():
            with contextlib.suppress(queue.Empty):
                return self._replies.get(timeout=seconds)
        raise StartTimeout(
            f"start_timeout has passed, and the process on {host_name()} that starts the ranks has "
            f"not answered (supervisor, process {self._supervisor_pid}). It was stopped, or hangs "
            "while it forks, perhaps in a function that a preloaded module has registered with "
            "os.register_at_fork."
        )

    def _send_request(
        self,
        worker_spec: WorkerSpec,
        environment: Mapping[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
    ) -> None:
        request = pickle.dumps(StartRank(worker_spec, self._attributes))
        folder = os.open(".", os.O_PATH)
        with anonymous_file() as file:
            pickle.dump(dict(environment), file)
            file.flush()
            descriptors = [file.fileno(), folder, stdout.fileno(), stderr.fileno()]
            with contextlib.suppress(OSError):  # the reader notices that the supervisor has gone
                socket.send_fds(
                    self._connection, [request], descriptors + worker_spec.descriptors()
                )
        os.close(folder)

    def _read(self) -> None:
        """Receive the supervisor's messages until it has gone."""
        while message := receive(self._connection):
            if isinstance(message, RankStarted):
                self._processes[message.pid] = Process(message.pid, self._on_end)
                self._replies.put(message)
            elif isinstance(message, RankEnded):
                self._processes[message.pid].record_end(message.returncode)
            elif isinstance(message, Refused):
                self._replies.put(message)
        self._replies.put(Refused("its supervisor has ended."))
        if lost := [process for process in self._processes.values() if process.running]:
            self._end_lost(lost)

    def _end_lost(self, ranks: list[Process]) -> None:
        """End what is left of ranks that the kernel has killed with their supervisor."""
        for rank in ranks:
            kill_group(rank.pid)
        kill_by_environment(self._run_variables)
        for rank in ranks:
            rank.record_end(-signal.SIGKILL)
