"""A warm process: it has imported torch, and forks a supervisor for each run.

It belongs to one owner (a driver, an executor), and ends with it, when nobody has asked it for a
while, or when what it was made of has changed; the runs that came of it go on. It has one thread
and never touches CUDA, so that what descends from it is as good as new.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import selectors
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import NoReturn

from distributor._compat.cpython import disable_exit_finalizers
from distributor._compat.torch import OPTIMIZER_IMPORTS
from distributor.core.kernel import set_subreaper
from distributor.node.process.exit import flush_streams
from distributor.node.process.fork_reset import become
from distributor.node.process.ipc import (
    MAX_MESSAGE,
    Birth,
    Fork,
    Hello,
    Retire,
    Stale,
    Trouble,
    peer_of,
    say,
)
from distributor.node.process.preload_spec import changed, loaded_files
from distributor.node.process.process_attributes import ProcessAttributes
from distributor.node.process.process_title import set_title
from distributor.node.process.supervisor import (
    FORKS_DESCRIPTORS,
    Supervisor,
    children,
    end_strays,
    forget,
)
from distributor.node.process.worker_spec import WorkerSpec

NEEDED = ("distributor.node.worker.main", "cloudpickle", "torch", "torch.distributed")
MOMENT = 2.0
IDLE_SECONDS = 1800.0
LOAD_SECONDS = 600
TEXT_ROOM = 4 * 1024


def serve(argument: str) -> WorkerSpec:
    """Be a zygote. Returns in each rank that it forks, and nowhere else."""
    birth = Birth.from_argument(argument)
    set_title(f"zygote for process {birth.owner}", "zygote")
    before, since = dict(os.environ), time.time_ns()
    with _watching(birth.owner):
        trouble = _load((*NEEDED, *birth.preload_spec.preload), optional="torch")
    return _Zygote(birth, trouble, before, since).serve()


class _Zygote:
    def __init__(
        self, birth: Birth, trouble: str | None, before: Mapping[str, str], since: int
    ) -> None:
        set_subreaper()
        self._preload_spec = birth.preload_spec
        self._trouble = trouble
        self._born_with = before
        self._files: dict[str, tuple[int, int]] = {}
        self._since = since
        self._attributes = ProcessAttributes.current()
        self._listener = socket.socket(fileno=birth.listener)
        self._owner = os.pidfd_open(birth.owner)
        self._callers: set[socket.socket] = set()
        self._supervisors: dict[int, int] = {}  # the process and its pidfd
        self._helpers: set[int] = set()
        self._later = list(OPTIMIZER_IMPORTS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._owner, selectors.EVENT_READ, self._leave)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._settle()

    def serve(self) -> WorkerSpec:
        """Fork supervisors for whoever asks. Returns in the ranks that those fork, nowhere else."""
        while True:
            events = self._selector.select(self._patience())
            if not events:
                self._idle()
            for key, _ in events:
                worker_spec: WorkerSpec | None = key.data()
                if worker_spec is not None:
                    return worker_spec

    def _patience(self) -> float | None:
        if self._supervisors:
            return None
        return MOMENT if self._later else IDLE_SECONDS

    def _idle(self) -> None:
        if not self._later:
            self._leave()
        before = dict(os.environ)
        _load(self._later)
        self._later.clear()
        os.environ.clear()  # of what it set there; ranks have not asked for it
        os.environ.update(before)
        self._settle()

    def _settle(self) -> None:
        """Take stock of what is loaded."""
        self._helpers.update(children())  # which a module has started
        # Files as they were when they were loaded, not as they are now.
        self._files = loaded_files(self._since) | self._files
        self._since = time.time_ns()
        flush_streams()  # what a module printed is not the ranks'
        gc.collect()
        gc.freeze()  # or the collector of each rank would make it copy what all of them share
        disable_exit_finalizers()  # of what is this process's own; torch has hundreds of them

    def _leave(self) -> NoReturn:
        os._exit(0)

    def _accept(self) -> None:
        caller, _ = self._listener.accept()
        if peer_of(caller).uid != os.getuid():
            caller.close()
            return
        self._callers.add(caller)
        self._selector.register(caller, selectors.EVENT_READ, lambda: self._hear(caller))

    def _hear(self, caller: socket.socket) -> WorkerSpec | None:
        try:
            message = pickle.loads(caller.recv(MAX_MESSAGE))
        except Exception:
            message = None  # the connection has ended, or it is no sense that came over it
        self._callers.discard(caller)
        self._selector.unregister(caller)
        with caller:
            if isinstance(message, Retire):
                self._leave()
            return self._answer(caller, message) if isinstance(message, Hello) else None

    def _answer(self, caller: socket.socket, hello: Hello) -> WorkerSpec | None:
        if self._trouble is not None:
            self._refuse(caller, Trouble(self._trouble))
        if self._preload_spec.covers(hello.wanted) and not changed(self._files):
            return self._keep_for(caller)
        self._refuse(caller, Stale(self._preload_spec.left_to(hello.wanted)))

    def _refuse(self, caller: socket.socket, answer: Trouble | Stale) -> NoReturn:
        """End with an answer to all who wait; the one that started this process may be the last."""
        self._listener.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                self._accept()
        self._listener.close()  # the name is free before anyone knows
        for other in self._callers:
            with contextlib.suppress(OSError):
                other.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)  # unread, it would undo the answer
            say(other, answer)
        say(caller, answer)
        self._leave()

    def _keep_for(self, agent: socket.socket) -> WorkerSpec | None:
        """Fork a supervisor, which answers its agent itself."""
        try:
            pid = _fork()
        except OSError as error:
            say(agent, Trouble(f"no process could be forked: {error}"))
            return None
        if pid:
            self._supervisors[pid] = pidfd = os.pidfd_open(pid)
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._note_end(pid))
            return None
        forget(self._selector, keep=self._owner)
        try:
            supervisor = Supervisor(agent, self._fork_rank, self._owner)
        except OSError:
            os._exit(1)  # the agent has died
        return supervisor.serve()

    def _fork_rank(self, wanted: Fork, descriptors: list[int]) -> tuple[int, WorkerSpec | None]:
        supervisor, pid = os.getpid(), _fork()
        if pid:
            return pid, None
        become(
            self._attributes,
            wanted.attributes,
            self._born_with,
            descriptors[:FORKS_DESCRIPTORS],
        )
        return 0, wanted.worker_spec.with_descriptors(descriptors[FORKS_DESCRIPTORS:], supervisor)

    def _note_end(self, pid: int) -> None:
        pidfd = self._supervisors.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        # Where the supervisor was killed there are some.
        end_strays(lambda stray: stray not in self._supervisors and stray not in self._helpers)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: libraries stop theirs in time
        return os.fork()


def _load(modules: tuple[str, ...] | list[str], optional: str = "") -> str | None:
    """Import modules; give the traceback of the first that cannot be, unless it is optional."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException:  # a module may even exit
            if name.partition(".")[0] != optional:
                text = traceback.format_exc()
                if len(text) > 2 * TEXT_ROOM:
                    text = f"{text[:TEXT_ROOM]}\n...\n{text[-TEXT_ROOM:]}"
                return f"{name} cannot be imported:\n{text}"
    return None


@contextlib.contextmanager
def _watching(owner: int) -> Iterator[None]:
    """End with the owner even while a module loads, perhaps for ever, and nothing else happens."""
    pidfd = os.pidfd_open(owner)
    give_up = time.monotonic() + LOAD_SECONDS

    def look(*_: object) -> None:
        if select.select([pidfd], [], [], 0)[0] or time.monotonic() > give_up:
            os._exit(1)

    usual = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, usual)
        os.close(pidfd)
