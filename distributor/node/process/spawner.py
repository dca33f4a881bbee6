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
from distributor.node.process.signals import ignores, kill_by_environment, signal_group
from distributor.node.process.worker_spec import WorkerSpec

RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "GROUP_RANK")
"""Variables of ranks, and of all that they start, whose values no other node or run has."""


class Process:
    """A rank's process, the leader of its own process group.

    Attributes
    ----------
    returncode : int or None
        As `subprocess` has it: the exit code, or minus the signal; None while it runs.
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
        """Ask the process, and all that it started in its group, to end; kill it if it is deaf."""
        if self.running:
            signal_group(self.pid, signal.SIGTERM)
            if ignores(self.pid, signal.SIGTERM):
                self.kill()

    def kill(self) -> None:
        """Kill the process; who started it sees to what it started."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self, returncode: int) -> None:
        """Note how it ended."""
        self.returncode = returncode
        self._on_end()
        self._ended.set()

    def join(self, seconds: float) -> bool:
        """Wait until it has ended; tell whether it has."""
        return self._ended.wait(seconds)


class Spawner(Protocol):
    """Starts processes; a context manager, in which they run."""

    def __enter__(self) -> Spawner:
        """Begin."""

    def __exit__(self, *exc_info: object) -> None:
        """Let go of what it needed to watch them; all have ended."""

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
            What the rank is told, with descriptors of this process.
        environment : mapping of str to str
            Its whole environment.
        stdout, stderr : BinaryIO
            Where it prints.
        on_end : callable
            Called once when it has ended, on any thread.
        """


class FreshSpawner:
    """Starts each rank in a new interpreter, on systems without what a supervisor needs.

    What ranks have started in their process groups ends with them. On Linux, the rest ends with
    the run, unless the agent is killed or such a process has cleared its environment.

    Parameters
    ----------
    interpreter : Interpreter
        The one.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._common: dict[str, str] = {}

    def __enter__(self) -> FreshSpawner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._common and sys.platform == "linux":
            kill_by_environment(self._common)

    def start(
        self,
        worker_spec: WorkerSpec,
        environment: Mapping[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
        on_end: Callable[[], object],
    ) -> Process:
        self._common = {name: environment[name] for name in RUN_VARIABLES}
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
        threading.Thread(target=_watch, args=(child, process), daemon=True).start()
        return process


def _watch(child: subprocess.Popen[bytes], process: Process) -> None:
    with contextlib.suppress(AttributeError, OSError):  # macOS has it since Python 3.13
        # Until it is reaped, its number cannot become another process group's.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        signal_group(child.pid, signal.SIGKILL)
    process.end(child.wait())
