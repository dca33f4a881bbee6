"""Spawns the processes of ranks, signals them, and observes their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO, Protocol

from distributor.node.process.interpreter import Interpreter
from distributor.node.process.signals import (
    ignores_signal,
    kill_by_environment,
    signal_group,
)
from distributor.node.process.worker_spec import WorkerSpec

RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "GROUP_RANK")
"""Variables of ranks and of all that they start; together they identify a run and a node of it."""


class Process:
    """A rank's process, which leads its own process group.

    Parameters
    ----------
    pid : int
        The process id.
    on_end : callable
        Called once when the process has ended, on any thread.

    Attributes
    ----------
    returncode : int or None
        The exit code, or minus the signal, as in `subprocess`; None while the process runs.
    """

    def __init__(self, pid: int, on_end: Callable[[], object]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._on_end = on_end
        self._ended = threading.Event()

    @property
    def running(self) -> bool:
        return self.returncode is None

    def terminate(self) -> None:
        """Send SIGTERM to the process group, and kill the process if it ignores SIGTERM."""
        if self.running:
            signal_group(self.pid, signal.SIGTERM)
            if ignores_signal(self.pid, signal.SIGTERM):
                self.kill()

    def kill(self) -> None:
        """Kill the process. Its parent kills the rest of its process group."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def record_end(self, returncode: int) -> None:
        """Record how the process ended."""
        self.returncode = returncode
        self._on_end()
        self._ended.set()

    def join(self, seconds: float) -> bool:
        """Wait until the process has ended; return False if it has not ended in time."""
        return self._ended.wait(seconds)


class Spawner(Protocol):
    """Starts processes; a context manager, within which they run."""

    def __enter__(self) -> Spawner:
        """Begin to watch processes."""

    def __exit__(self, *exc_info: object) -> None:
        """Release the resources; all processes must have ended."""

    def start(
        self,
        worker_spec: WorkerSpec,
        environment: Mapping[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
        on_end: Callable[[], object],
    ) -> Process:
        """Start a rank.

        Parameters
        ----------
        worker_spec : WorkerSpec
            What the rank gets, with descriptors of this process.
        environment : mapping of str to str
            The whole environment of the rank.
        stdout, stderr : BinaryIO
            The files that the rank prints to.
        on_end : callable
            Called once when the rank's process has ended, on any thread.

        Raises
        ------
        DistributorError, OSError
            If no process can be started.
        """


class FreshSpawner:
    """Starts each rank in a new interpreter, on systems that lack what a supervisor needs.

    The rest of a rank's process group is killed when the rank ends. On Linux, processes that have
    left the group are killed at the end of the run, unless the agent is killed or such a process
    has cleared its environment.

    Parameters
    ----------
    interpreter : Interpreter
        The interpreter of the ranks.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._run_variables: dict[str, str] = {}

    def __enter__(self) -> FreshSpawner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._run_variables and sys.platform == "linux":
            kill_by_environment(self._run_variables)

    def start(
        self,
        worker_spec: WorkerSpec,
        environment: Mapping[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
        on_end: Callable[[], object],
    ) -> Process:
        self._run_variables = {name: environment[name] for name in RUN_VARIABLES}
        child = subprocess.Popen(
            self._interpreter.command("rank", worker_spec.to_argument()),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=worker_spec.descriptors(),
            start_new_session=True,
            env=environment,
        )
        process = Process(child.pid, on_end)
        threading.Thread(target=_await_end, args=(child, process), daemon=True).start()
        return process


def _await_end(child: subprocess.Popen[bytes], process: Process) -> None:
    with contextlib.suppress(AttributeError, OSError):  # macOS has waitid since Python 3.13
        # Until the child is reaped, its id cannot become that of another process group.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        signal_group(child.pid, signal.SIGKILL)
    process.record_end(child.wait())
