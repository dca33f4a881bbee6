"""The agent's side of a supervisor, which starts the ranks of one run."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO, NamedTuple

from distributor.core.kernel import lacking_for_supervision
from distributor.errors import DistributorError
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.ipc import Ended, Fork, Forked, Ready, Trouble, receive
from distributor.node.process.process_attributes import ProcessAttributes
from distributor.node.process.signals import kill_by_environment, kill_group
from distributor.node.process.spawner import RUN_VARIABLES, Process
from distributor.node.process.worker_spec import WorkerSpec
from distributor.serialization.oob_pickle import anonymous_file

BEGIN_SECONDS = 60.0
"""Seconds that a fresh supervisor, which imports little, has to come up."""
END_SECONDS = 10.0
"""Seconds that a supervisor has to end all that descends from it."""


def is_supported() -> bool:
    """Return whether this system has what supervisors and zygotes need; macOS has not."""
    return not lacking_for_supervision()


class SupervisorConnection(NamedTuple):
    """The connection to a supervisor that is ready, and its process."""

    connection: socket.socket
    supervisor: int


def fresh_supervisor(interpreter: Interpreter) -> SupervisorConnection:
    """Start a supervisor that starts each rank in a new interpreter of its own kind."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {**os.environ, **interpreter.variables}
        number = theirs.fileno()
        supervisor = interpreter.start_detached("supervisor", str(number), number, environment)
    ours.settimeout(BEGIN_SECONDS)
    if not isinstance(receive(ours), Ready):
        raise DistributorError(
            f"{interpreter.executable} could not be started as the supervisor of ranks."
        )
    ours.settimeout(None)
    return SupervisorConnection(ours, supervisor)


class SupervisedSpawner:
    """Has a supervisor start each rank.

    Parameters
    ----------
    connection : SupervisorConnection
        The supervisor.
    """

    def __init__(self, connection: SupervisorConnection) -> None:
        self._connection, self._supervisor = connection
        self._attributes = ProcessAttributes.current()
        self._processes: dict[int, Process] = {}
        self._answers: queue.SimpleQueue[Forked | Trouble] = queue.SimpleQueue()
        self._on_end: Callable[[], object] = lambda: None
        self._common: dict[str, str] = {}
        self._reader = threading.Thread(target=self._read, name="supervisor-reader", daemon=True)

    def __enter__(self) -> SupervisedSpawner:
        self._reader.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._reader.join(END_SECONDS)
        if self._reader.is_alive():  # somebody has stopped it
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._supervisor, signal.SIGKILL)
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
        self._common = {name: environment[name] for name in RUN_VARIABLES}
        wanted = pickle.dumps(Fork(worker_spec, self._attributes))
        folder = os.open(".", os.O_PATH)
        with anonymous_file() as file:
            pickle.dump(dict(environment), file)
            file.flush()
            descriptors = [file.fileno(), folder, stdout.fileno(), stderr.fileno()]
            with contextlib.suppress(OSError):  # the reader sees that it has gone
                socket.send_fds(self._connection, [wanted], descriptors + worker_spec.descriptors())
        os.close(folder)
        answer = self._answers.get()
        if isinstance(answer, Trouble):
            raise DistributorError(f"A rank could not be started: {answer.text}")
        return self._processes[answer.pid]

    def _read(self) -> None:
        while message := receive(self._connection):
            if isinstance(message, Forked):
                self._processes[message.pid] = Process(message.pid, self._on_end)
                self._answers.put(message)
            elif isinstance(message, Ended):
                self._processes[message.pid].end(message.returncode)
            elif isinstance(message, Trouble):
                self._answers.put(message)
        self._answers.put(Trouble("their supervisor has ended."))
        if lost := [process for process in self._processes.values() if process.running]:
            self._end_lost(lost)

    def _end_lost(self, ranks: list[Process]) -> None:
        """End what came of ranks that the kernel has killed with their supervisor."""
        for rank in ranks:
            kill_group(rank.pid)
        kill_by_environment(self._common)
        for rank in ranks:
            rank.end(-signal.SIGKILL)
