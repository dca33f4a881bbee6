"""Spawns the processes of ranks: with which interpreter, with what, and how it is observed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from distributor.core.module_search import lasting_path
from distributor.node.process.signals import (
    ignores_signal,
    kill,
    kill_by_environment,
    signal_group,
)
from distributor.node.process.specs import WorkerSpec

# Of ranks and of all that they start; together they identify a run and a node of it.
RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "GROUP_RANK")
CHECK_SECONDS = 0.1  # between two checks whether the run goes on
# The program of a new interpreter; its arguments are a role, the role's argument and a `sys.path`.
# If the interpreter's start (a `sitecustomize`) has imported this package, that may be another
# copy, so it is dropped. Exit handlers run in reverse order of registration: ours is registered
# before any import, and so runs after all others.
BOOT = """
import atexit, json, sys
exit_handlers = []
atexit.register(lambda: [handler() for handler in exit_handlers])
sys.path[:] = json.loads(sys.argv.pop())
for name in [name for name in sys.modules if name.partition(".")[0] == "distributor"]:
    del sys.modules[name]
from distributor.node import bootstrap
bootstrap.main(*sys.argv[1:], exit_handlers)
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The interpreter of ranks and of the processes that start them.

    It needs its environment variables in addition to those of its parent.
    """

    executable: str
    path: tuple[str, ...]  # its `sys.path`
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def current(cls) -> Interpreter:
        """Return the interpreter of this process, with the modules that can be imported here."""
        return cls(executable=sys.executable, path=tuple(lasting_path()))

    def start(
        self,
        role: str,
        argument: str,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        stdout: int | BinaryIO = subprocess.DEVNULL,
        stderr: int | BinaryIO = subprocess.DEVNULL,
        folder: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start it as a "rank", "supervisor" or "zygote", in a session of its own."""
        return subprocess.Popen(
            [self.executable, "-c", BOOT, role, argument, json.dumps(self.path)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            pass_fds=descriptors,
            start_new_session=True,
            env=environment,
        )

    def start_detached(
        self, role: str, argument: str, descriptor: int, environment: Mapping[str, str]
    ) -> int:
        """Start it without output, and reap it when it ends."""
        child = self.start(role, argument, [descriptor], environment)
        threading.Thread(target=child.wait, name=f"{role}-reaper", daemon=True).start()
        return child.pid


@dataclass(frozen=True)
class StartLimit:
    """How long the start of ranks is waited for: until a time, by ``time.monotonic``.

    `check` is called again and again meanwhile, and raises an exception if the run has ended.
    """

    deadline: float = math.inf
    check: Callable[[], object] = lambda: None

    def intervals(self) -> Iterator[float]:
        """Yield how many seconds to wait for next, until the deadline has passed."""
        while (left := self.deadline - time.monotonic()) > 0:
            self.check()
            yield min(left, CHECK_SECONDS)


class Process:
    """A rank's process, which leads its own process group."""

    def __init__(self, pid: int, on_end: Callable[[], object]) -> None:
        self.pid = pid
        self.returncode: int | None = None  # or minus the signal; None while the process runs
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
            kill(self.pid)

    def record_end(self, returncode: int) -> None:
        self.returncode = returncode
        self._on_end()
        self._ended.set()

    def join(self, seconds: float) -> bool:
        """Wait until the process has ended; return False if it has not ended in time."""
        return self._ended.wait(seconds)


class Spawner(Protocol):
    """Starts processes that end within its context."""

    def __enter__(self) -> Spawner: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def start(
        self,
        worker_spec: WorkerSpec,
        environment: Mapping[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
        on_end: Callable[[], object],
    ) -> Process:
        """Start a rank; `on_end` is called once when it has ended, on any thread."""


class FreshSpawner:
    """Starts each rank in a new interpreter, on systems that lack what a supervisor needs.

    The rest of a rank's process group is killed when the rank ends. On Linux, processes that have
    left the group are killed at the end of the run, unless the agent is killed or such a process
    has cleared its environment.
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
        argument, descriptors = worker_spec.to_argument(), worker_spec.descriptors()
        child = self._interpreter.start("rank", argument, descriptors, environment, stdout, stderr)
        process = Process(child.pid, on_end)
        threading.Thread(target=_await_end, args=(child, process), daemon=True).start()
        return process


def _await_end(child: subprocess.Popen[bytes], process: Process) -> None:
    with contextlib.suppress(AttributeError, OSError):  # macOS has waitid since Python 3.13
        # Until the child is reaped, its id cannot become that of another process group.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        signal_group(child.pid, signal.SIGKILL)
    process.record_end(child.wait())
