"""The parent of one run's ranks on one node, which ends everything that they start.

Whatever a rank starts, in whatever session, is a descendant of its supervisor for as long as that
lives, since the kernel hands orphans to their nearest such ancestor. The supervisor kills all of it
when the agent closes its connection or has died.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from distributor.core.kernel import set_subreaper
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.ipc import (
    MAX_MESSAGE,
    Ended,
    Fork,
    Forked,
    Ready,
    Trouble,
    environment_in,
    peer_of,
    say,
)
from distributor.node.process.process_title import set_run_title
from distributor.node.process.scratch import remove_scratch
from distributor.node.process.signals import (
    RESOURCE_TRACKER_SECONDS,
    TICK,
    all_processes,
    group_of,
    is_resource_tracker,
)
from distributor.node.process.worker_spec import WorkerSpec

FORKS_DESCRIPTORS, MAX_DESCRIPTORS = 4, 16
GIVE_UP_SECONDS = 10.0
"""Seconds after which what cannot be killed, for it hangs in the kernel, is left alone."""

Start = Callable[[Fork, list[int]], "tuple[int, WorkerSpec | None]"]
"""Starts what is asked for, with these descriptors; returns its process or, in a fork, its spec."""


class Supervisor:
    """Starts ranks for one agent, and leaves none of their processes behind.

    Parameters
    ----------
    agent : socket
        The connection to the agent.
    start : callable
        How a rank is started.
    owner : int or None
        The pidfd of another process with which it ends.
    """

    def __init__(self, agent: socket.socket, start: Start, owner: int | None = None) -> None:
        set_subreaper()
        self._agent = agent
        self._start = start
        self._ranks: dict[int, int] = {}  # the process and its pidfd
        self._scratches: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent, selectors.EVENT_READ, self._hear)
        # Another process may hold the agent's end of the connection open by a fork of its own.
        watched = [os.pidfd_open(peer_of(agent).pid), *([] if owner is None else [owner])]
        for pidfd in watched:
            self._selector.register(pidfd, selectors.EVENT_READ, self._leave)

    def serve(self) -> WorkerSpec:
        """Start ranks. Returns in those that are forked from here, and nowhere else."""
        say(self._agent, Ready(os.getpid()))
        while True:
            for key, _ in self._selector.select():
                worker_spec: WorkerSpec | None = key.data()
                if worker_spec is not None:
                    return worker_spec

    def _hear(self) -> WorkerSpec | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._agent, MAX_MESSAGE, MAX_DESCRIPTORS)
            message = pickle.loads(data)
        except Exception:
            self._leave()  # the connection has ended, or it is no sense that came over it
        if not isinstance(message, Fork) or len(descriptors) < FORKS_DESCRIPTORS:
            self._leave()
        if not self._ranks:
            set_run_title(
                "supervisor", message.worker_spec.program_name, message.worker_spec.run_id
            )
        try:
            pid, worker_spec = self._start(message, descriptors)
        except OSError as error:
            say(self._agent, Trouble(f"no process could be started: {error}"))
            return None
        if worker_spec is not None:
            forget(self._selector)
            return worker_spec
        for descriptor in descriptors:
            os.close(descriptor)
        self._ranks[pid] = pidfd = os.pidfd_open(pid)
        self._scratches[pid] = message.worker_spec.scratch
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._note_end(pid))
        say(self._agent, Forked(pid))
        return None

    def _note_end(self, pid: int) -> None:
        """Tell how a rank ended, once the rest of its process group has."""
        pidfd = self._ranks.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        # It is not reaped yet, so that its number cannot have become another process group's.
        end_strays(
            lambda stray: stray not in self._ranks and stray != pid and group_of(stray) == pid
        )
        _, status = os.waitpid(pid, 0)
        say(self._agent, Ended(pid, os.waitstatus_to_exitcode(status)))

    def _leave(self) -> NoReturn:
        """End all that still runs."""
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)
        self._ranks.clear()
        end_strays(lambda stray: True)
        for scratch in self._scratches.values():
            remove_scratch(scratch)
        self._agent.close()  # it need not wait until this process's memory is given back
        os._exit(0)


def serve_fresh(argument: str) -> NoReturn:
    """Be the supervisor of ranks that each have an interpreter of their own."""
    agent = socket.socket(fileno=int(argument))
    agent.set_inheritable(False)
    Supervisor(agent, _execute).serve()
    raise AssertionError("nothing is forked from it that could come back")


def _execute(wanted: Fork, descriptors: list[int]) -> tuple[int, None]:
    environment, folder, stdout, stderr, *given = descriptors
    worker_spec = wanted.worker_spec.with_descriptors(given, os.getpid())
    child = subprocess.Popen(
        Interpreter.current().command("rank", worker_spec.to_argument()),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=f"/proc/self/fd/{folder}",
        pass_fds=given,
        start_new_session=True,
        env=environment_in(environment),
    )
    child.returncode = 0  # the supervisor reaps it
    return child.pid, None


def forget(selector: selectors.BaseSelector, keep: int | None = None) -> None:
    """Close, in a fork, what its parent watches, less the descriptor that it is to keep."""
    for key in list(selector.get_map().values()):
        if key.fd != keep:
            os.close(key.fd)
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.detach()
    selector.close()


def end_strays(doomed: Callable[[int], bool]) -> None:
    """Kill and reap children of this process, and what is orphaned by that, until none is left.

    Trackers end by themselves, and are waited for.
    """
    began = time.monotonic()
    while strays := [child for child in children() if doomed(child)]:
        killed = [stray for stray in strays if not is_resource_tracker(stray)]
        if time.monotonic() > began + (GIVE_UP_SECONDS if killed else RESOURCE_TRACKER_SECONDS):
            return
        for stray in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
        for stray in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(stray, os.WNOHANG)
        time.sleep(TICK)


def children() -> list[int]:
    """List the children of this process, which has one thread."""
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    if file.exists():
        return [int(pid) for pid in file.read_text().split()]
    return [pid for pid in all_processes() if _parent(pid) == os.getpid()]


def _parent(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])
