"""A warm process: it has imported torch, and forks a supervisor for each run.

It belongs to one owner: a driver, or the parent of an executor's Python workers. It has one thread
and never touches CUDA, so that its descendants are as good as new processes.

Life cycle:

1. *Load*: it imports what every rank needs and the user's preloaded modules. Clients can connect
   already, and wait. It exits if the owner dies or the imports take more than ten minutes.
2. *Serve*: for each `RequestSupervisor` that it fits, it forks a supervisor, which replies. To the
   first other request it replies with `Refused` (a preloaded module cannot be imported) or `Stale`
   (the caller needs something else, an imported file has changed, or the container of YARN has
   lost it), and exits.
3. *Idle*: two seconds without a request it also imports what the ranks of a `TorchTrainer` need,
   for the next attempt of a run that fails, and then what the first optimizer of a rank would
   otherwise spend a second on. The latter comes half a minute later if there are supervisors,
   because their ranks may be starting.
4. *Exit*: when the owner has died, a client asks for it, it has been idle for half an hour, or its
   reply was `Refused` or `Stale`. Its supervisors and their runs continue, except that they too end
   with the owner.

Supervisors and ranks are forked from here: `serve` returns in each rank, and nowhere else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import selectors
import signal
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NoReturn

from distributor._compat.cpython import disable_exit_finalizers
from distributor._compat.torch import OPTIMIZER_IMPORTS
from distributor.core.kernel import set_subreaper
from distributor.core.module_search import find_at
from distributor.core.procfs import child_pids
from distributor.core.resources import IN_YARN
from distributor.node.process.exit import flush_streams, remember_modules
from distributor.node.process.fork_reset import reset_after_fork
from distributor.node.process.ipc import (
    MAX_MESSAGE_BYTES,
    Forked,
    Refused,
    RequestSupervisor,
    ShutDown,
    Stale,
    StartRank,
    ZygoteArguments,
    peer_credentials,
    send,
)
from distributor.node.process.preload_spec import (
    FileStates,
    Imports,
    PreloadSpec,
    have_changed,
    loaded_files,
)
from distributor.node.process.process_attributes import ProcessAttributes
from distributor.node.process.process_title import set_title
from distributor.node.process.supervisor import (
    PROCESS_DESCRIPTORS,
    Supervisor,
    close_inherited,
    kill_children,
)
from distributor.node.process.worker_spec import WorkerSpec

RANK_IMPORTS = ("distributor.node.worker.main", "cloudpickle", "torch", "torch.distributed")
"""What every rank needs; an environment may lack torch."""
TRAINER_IMPORTS = ("distributor.train.runtime.worker_loop",)
"""What the program of a `TorchTrainer` imports, which takes each rank a tenth of a second."""
IDLE_IMPORTS = (*TRAINER_IMPORTS, *OPTIMIZER_IMPORTS)
IDLE_IMPORT_SECONDS = float(os.environ.get("DISTRIBUTOR_IDLE_IMPORT_SECONDS", "2"))
"""Seconds without a request after which the next of `IDLE_IMPORTS` is imported.

The variable is for tests, which start many zygotes: the imports take two CPU seconds in each.
"""
BUSY_IMPORT_SECONDS = 15 * IDLE_IMPORT_SECONDS
"""The same for those that take long, while there are supervisors: their ranks use the CPUs."""
IDLE_EXIT_SECONDS = 1800.0
"""Seconds without a request or a run after which the zygote exits."""
SUPERVISOR_EXIT_SECONDS = 20.0
"""Seconds that supervisors have to end with the owner: one that hangs in a fork does not."""
LOAD_SECONDS = 600
"""Seconds that the first imports may take."""


def serve(argument: str) -> WorkerSpec:
    """Run as a zygote. Returns in each rank that descends from it, and nowhere else."""
    arguments = ZygoteArguments.from_argument(argument)
    set_title(f"zygote for process {arguments.owner}", "zygote")
    since, imports = time.time_ns(), Imports()
    with _exit_if_owner_dies(arguments.owner):
        find_at(arguments.preload_spec.located)
        preload = arguments.preload_spec.preload
        import_error = imports.add((*RANK_IMPORTS, *preload), optional="torch")
    return _Zygote(arguments, import_error, imports, since).serve()


class _Zygote:
    """A zygote that has loaded its modules, or failed to."""

    def __init__(
        self,
        arguments: ZygoteArguments,
        import_error: str | None,
        imports: Imports,
        since: int,
    ) -> None:
        set_subreaper()
        self._preload_spec = arguments.preload_spec
        self._import_error = import_error
        self._imports = imports
        self._files: FileStates = {}
        self._since = since
        self._parent = os.getppid()
        self._attributes = ProcessAttributes.current()
        self._listener = socket.socket(fileno=arguments.listener)
        self._owner = os.pidfd_open(arguments.owner)
        self._clients: set[socket.socket] = set()  # that have not sent their request yet
        self._supervisors: dict[int, int] = {}  # pidfds, by process id
        self._helpers: set[int] = set()  # children that an imported module has started
        self._idle_imports = list(IDLE_IMPORTS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._owner, selectors.EVENT_READ, self._exit_with_owner)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._settle()

    def serve(self) -> WorkerSpec:
        """Fork a supervisor for each fitting request. Returns only in the ranks of supervisors."""
        while True:
            events = self._selector.select(self._idle_seconds())
            if not events:
                self._handle_idleness()
            for key, _ in events:
                worker_spec: WorkerSpec | None = key.data()
                if worker_spec is not None:
                    return worker_spec

    def _idle_seconds(self) -> float | None:
        if not self._idle_imports:
            return None if self._supervisors else IDLE_EXIT_SECONDS
        takes_long = self._idle_imports[0] not in TRAINER_IMPORTS
        return BUSY_IMPORT_SECONDS if takes_long and self._supervisors else IDLE_IMPORT_SECONDS

    def _handle_idleness(self) -> None:
        if not self._idle_imports:
            self._exit()
        self._imports.add([self._idle_imports.pop(0)])
        self._settle()

    def _settle(self) -> None:
        """Record what has been imported, and make it cheap and safe to fork."""
        self._helpers.update(child_pids())
        # A file that was recorded before keeps the state that it had when it was imported.
        self._files = loaded_files(self._since) | self._files
        self._since = time.time_ns()
        flush_streams()  # or each rank would print what a module has printed
        remember_modules()
        gc.collect()
        gc.freeze()  # or each rank's garbage collector would copy the pages that all ranks share
        disable_exit_finalizers()  # they belong to this process; torch has hundreds of them

    def _exit(self) -> NoReturn:
        os._exit(0)

    def _exit_with_owner(self) -> NoReturn:
        """Exit once the supervisors, which end with the owner too, have ended; kill the rest."""
        deadline = time.monotonic() + SUPERVISOR_EXIT_SECONDS
        for pidfd in self._supervisors.values():
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        if self._supervisors:
            kill_children(lambda child: child not in self._helpers)
        self._exit()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if peer_credentials(client).uid != os.getuid():
            client.close()
            return
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ, lambda: self._handle_message(client))

    def _handle_message(self, client: socket.socket) -> WorkerSpec | None:
        try:
            message = pickle.loads(client.recv(MAX_MESSAGE_BYTES))
        except Exception:
            message = None  # the connection has ended, or its peer is no client of ours
        self._clients.discard(client)
        self._selector.unregister(client)
        with client:
            if isinstance(message, ShutDown):
                self._exit()
            if isinstance(message, RequestSupervisor):
                return self._handle_request(client, message.preload_spec)
        return None

    def _handle_request(self, client: socket.socket, wanted: PreloadSpec) -> WorkerSpec | None:
        if self._import_error is not None:
            self._reply_and_exit(client, Refused(self._import_error))
        fits = self._preload_spec.covers(wanted) and not have_changed(self._files)
        if not fits or self._is_outside_of_container():
            preload = self._preload_spec.preload_for_successor(wanted)
            self._reply_and_exit(client, Stale(preload))
        return self._fork_supervisor(client, wanted.preload)

    def _is_outside_of_container(self) -> bool:
        """Return whether YARN no longer counts the memory of this process and its forks.

        It counts processes below the container's first one. Once the Python worker that started
        this process has ended, as Spark ends it when a task fails, it is not among them.
        """
        return IN_YARN in os.environ and os.getppid() != self._parent

    def _reply_and_exit(self, client: socket.socket, reply: Refused | Stale) -> NoReturn:
        """Send the reply to all who wait, and exit; the client that started us may come last."""
        self._listener.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                self._accept()
        self._listener.close()  # the name must be free before any client learns of the reply
        for other in self._clients:
            with contextlib.suppress(OSError):
                # To close a connection with unread data would discard the reply.
                other.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            send(other, reply)
        send(client, reply)
        self._exit()

    def _fork_supervisor(self, agent: socket.socket, preload: tuple[str, ...]) -> WorkerSpec | None:
        """Fork a supervisor, which replies to its agent itself."""
        try:
            pid = _fork()
        except OSError as error:
            send(agent, Refused(f"no process could be forked: {error}"))
            return None
        if pid:
            try:
                agent.sendall(pickle.dumps(Forked(pid)))
            except OSError:  # the agent has ended, or its run was cancelled
                os.kill(pid, signal.SIGKILL)
            self._supervisors[pid] = pidfd = os.pidfd_open(pid)
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._handle_end(pid))
            return None
        close_inherited(self._selector, keep=self._owner)
        set_by_imports = self._imports.variables((*RANK_IMPORTS, *preload))
        try:
            fork_rank = partial(self._fork_rank, set_by_imports, bool(preload))
            supervisor = Supervisor(agent, fork_rank, self._owner)
        except OSError:
            os._exit(1)  # the agent has died
        return supervisor.serve()

    def _fork_rank(
        self,
        set_by_imports: Mapping[str, str],
        has_preloads: bool,
        request: StartRank,
        descriptors: list[int],
    ) -> tuple[int, WorkerSpec | None]:
        """Fork a rank; runs in a supervisor."""
        supervisor, pid = os.getpid(), _fork()
        if pid:
            return pid, None
        reset_after_fork(
            self._attributes,
            request.attributes,
            set_by_imports,
            descriptors[:PROCESS_DESCRIPTORS],
        )
        spec_descriptors = descriptors[PROCESS_DESCRIPTORS:]
        worker_spec = request.worker_spec.with_descriptors(spec_descriptors, supervisor)
        return 0, replace(worker_spec, has_preloads=has_preloads)

    def _handle_end(self, pid: int) -> None:
        """Reap a supervisor and, if it was killed, end its orphans, which are now our children."""
        pidfd = self._supervisors.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        kill_children(lambda child: child not in self._supervisors and child not in self._helpers)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of a fork while threads run; libraries stop theirs before a fork.
        warnings.simplefilter("ignore")
        return os.fork()


@contextlib.contextmanager
def _exit_if_owner_dies(owner: int) -> Iterator[None]:
    """Exit with the owner, or after `LOAD_SECONDS`, even while an import hangs."""
    pidfd = os.pidfd_open(owner)
    deadline = time.monotonic() + LOAD_SECONDS

    def check(*_: object) -> None:
        if select.select([pidfd], [], [], 0)[0] or time.monotonic() > deadline:
            os._exit(1)

    previous_handler = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous_handler)
        os.close(pidfd)
