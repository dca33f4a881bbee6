"""The parent of one run's ranks on one node, which ends everything that they start.

Whatever a rank starts, in whatever session, is a descendant of its supervisor for as long as the
supervisor lives, because the kernel makes it the parent of orphans below it (a child subreaper).

Life cycle:

1. *Start*: a zygote forks the supervisor (warm ranks), or the agent starts it as a new interpreter
   (fresh ranks). It becomes a subreaper and sends `Ready` to the agent.
2. *Serve*: for each `StartRank` it forks or executes a rank and sends `RankStarted`, or `Refused`.
   When a rank has ended, it kills the rest of the rank's process group, reaps the rank and sends
   `RankEnded`.
3. *Shut down*: when the agent has closed the connection, has sent anything else or has died, or the
   zygote's owner has died, it kills all ranks and all other descendants, waits for resource
   trackers, removes the ranks' scratch folders and exits.

A rank that was forked leaves this module: `Supervisor.serve` returns in it.
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
from typing import NoReturn

from distributor.core.kernel import set_subreaper
from distributor.core.procfs import child_pids
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.ipc import (
    MAX_MESSAGE_BYTES,
    RankEnded,
    RankStarted,
    Ready,
    Refused,
    StartRank,
    peer_credentials,
    read_environment,
    send,
)
from distributor.node.process.process_title import set_run_title
from distributor.node.process.scratch import remove_scratch
from distributor.node.process.signals import (
    POLL_SECONDS,
    RESOURCE_TRACKER_SECONDS,
    is_resource_tracker,
    process_group_of,
)
from distributor.node.process.worker_spec import WorkerSpec

PROCESS_DESCRIPTORS, MAX_DESCRIPTORS = 4, 16
"""How many descriptors of a `StartRank` are not the spec's, and how many there may be in all."""
KILL_SECONDS = 10.0
"""Seconds after which descendants that cannot be killed, because they hang in the kernel, stay."""

Start = Callable[[StartRank, list[int]], "tuple[int, WorkerSpec | None]"]
"""Starts a rank with these descriptors; returns its process id or, in a forked rank, its spec."""


class Supervisor:
    """Starts ranks for one agent, and leaves none of their processes behind.

    Parameters
    ----------
    agent : socket
        The connection to the agent.
    start : callable
        How a rank is started.
    owner : int or None
        The pidfd of another process with which the supervisor ends.

    Raises
    ------
    OSError
        If the agent has already died.
    """

    def __init__(self, agent: socket.socket, start: Start, owner: int | None = None) -> None:
        set_subreaper()
        self._agent = agent
        self._start = start
        self._pidfds: dict[int, int] = {}  # of running ranks, by process id
        self._scratches: dict[int, str] = {}  # of all ranks, by process id
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent, selectors.EVENT_READ, self._handle_message)
        # If the agent has forked, its child may keep the agent's end of the connection open.
        watched = [os.pidfd_open(peer_credentials(agent).pid), *([] if owner is None else [owner])]
        for pidfd in watched:
            self._selector.register(pidfd, selectors.EVENT_READ, self._shut_down)

    def serve(self) -> WorkerSpec:
        """Start ranks until the end of the run. Returns only in a forked rank, with its spec."""
        send(self._agent, Ready(os.getpid()))
        while True:
            for key, _ in self._selector.select():
                worker_spec: WorkerSpec | None = key.data()
                if worker_spec is not None:
                    return worker_spec

    def _handle_message(self) -> WorkerSpec | None:
        message, descriptors = self._receive()
        if not self._scratches:
            spec = message.worker_spec
            set_run_title("supervisor", spec.program_name, spec.run_id)
        try:
            pid, worker_spec = self._start(message, descriptors)
        except OSError as error:
            send(self._agent, Refused(f"no process could be started: {error}"))
            return None
        if worker_spec is not None:
            close_inherited(self._selector)
            return worker_spec
        for descriptor in descriptors:
            os.close(descriptor)
        self._watch(pid, message.worker_spec.scratch)
        return None

    def _receive(self) -> tuple[StartRank, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._agent, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS
            )
            message = pickle.loads(data)
        except Exception:
            self._shut_down()  # the connection has ended, or its peer is no agent
        if not isinstance(message, StartRank) or len(descriptors) < PROCESS_DESCRIPTORS:
            self._shut_down()
        return message, descriptors

    def _watch(self, pid: int, scratch: str) -> None:
        self._pidfds[pid] = pidfd = os.pidfd_open(pid)
        self._scratches[pid] = scratch
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._handle_end(pid))
        send(self._agent, RankStarted(pid))

    def _handle_end(self, pid: int) -> None:
        """Report how a rank ended, once the rest of its process group has ended too."""
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        # The rank is not reaped yet, so its id cannot have become that of another process group.
        kill_children(
            lambda child: (
                child not in self._pidfds and child != pid and process_group_of(child) == pid
            )
        )
        _, status = os.waitpid(pid, 0)
        send(self._agent, RankEnded(pid, os.waitstatus_to_exitcode(status)))

    def _shut_down(self) -> NoReturn:
        """End all that still runs, and exit."""
        for pid in self._pidfds:
            os.kill(pid, signal.SIGKILL)
        self._pidfds.clear()
        kill_children(lambda child: True)
        for scratch in self._scratches.values():
            remove_scratch(scratch)
        # Closed explicitly, so that the agent need not wait until the kernel has freed our memory.
        self._agent.close()
        os._exit(0)


def serve_fresh(argument: str) -> NoReturn:
    """Run as the supervisor of ranks that each have an interpreter of their own."""
    agent = socket.socket(fileno=int(argument))
    agent.set_inheritable(False)
    Supervisor(agent, _execute_rank).serve()
    raise AssertionError("only forked ranks return, and none was forked")


def _execute_rank(request: StartRank, descriptors: list[int]) -> tuple[int, None]:
    environment, folder, stdout, stderr, *spec_descriptors = descriptors
    worker_spec = request.worker_spec.with_descriptors(spec_descriptors, os.getpid())
    child = subprocess.Popen(
        Interpreter.current().command("rank", worker_spec.to_argument()),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=f"/proc/self/fd/{folder}",
        pass_fds=spec_descriptors,
        start_new_session=True,
        env=read_environment(environment),
    )
    child.returncode = 0  # so that subprocess does not reap it: the supervisor does
    return child.pid, None


def close_inherited(selector: selectors.BaseSelector, keep: int | None = None) -> None:
    """Close, in a forked child, what its parent watches, except for one descriptor."""
    for key in list(selector.get_map().values()):
        if key.fd != keep:
            os.close(key.fd)
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.detach()
    selector.close()


def kill_children(is_doomed: Callable[[int], bool]) -> None:
    """Kill and reap children of this process, and the orphans that this makes, until none is left.

    Resource trackers end by themselves, and are waited for.
    """
    began = time.monotonic()
    while doomed := [child for child in child_pids() if is_doomed(child)]:
        to_kill = [child for child in doomed if not is_resource_tracker(child)]
        if time.monotonic() > began + (KILL_SECONDS if to_kill else RESOURCE_TRACKER_SECONDS):
            return
        for child in to_kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in doomed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(POLL_SECONDS)
