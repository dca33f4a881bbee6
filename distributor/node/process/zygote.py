"""A warm process: it has imported torch, and forks a supervisor for each run.

It belongs to one owner: a driver, or the parent of an executor's Python workers. It has one thread
and never touches CUDA, so that its descendants are as good as new processes. Its clients find or
start it by an address that is derived from the owner (`open_spawner`, `prepare`).

Life cycle:

1. *Load*: it imports what every rank needs and the user's preloaded modules. Clients can connect
   already, and wait. It exits if the owner dies or the imports take more than ten minutes.
2. *Serve*: for each `RequestSupervisor` that it fits, it forks a supervisor and sends `Forked`; the
   supervisor takes the connection over and sends `Ready`, before or after that. To the first other
   request it replies with `Refused` (a preloaded module cannot be imported) or `Stale` (the caller
   needs something else, an imported file has changed, or the container of YARN has lost it), and
   exits.
3. *Idle*: two seconds without a request it also imports what the ranks of a `TorchTrainer` need,
   for the next attempt of a run that fails, and then what the first optimizer of a rank would
   otherwise spend a second on. The latter comes half a minute later if there are supervisors,
   because their ranks may be starting. After `MANY_RUNS` runs, as in a study, it waits no longer.
4. *Exit*: when the owner has died, a client asks for it (`ShutDown`), it has been idle for half an
   hour, or its reply was `Refused` or `Stale`. Its supervisors and their runs continue, except that
   they too end with the owner.

Supervisors and ranks are forked from here: `serve` returns in each rank, and nowhere else.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import os
import pickle
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from distributor._compat.cpython import disable_exit_finalizers
from distributor._compat.torch import OPTIMIZER_IMPORTS
from distributor.core.addresses import host_name
from distributor.core.module_search import Location, find_at, not_on_path
from distributor.core.processes import Stat, child_pids, kill, set_subreaper, set_title, stat_field
from distributor.core.rank_variables import THREADS_VARIABLE
from distributor.core.resources import IN_YARN
from distributor.errors import DistributorError, StartTimeout
from distributor.node.process.exit import flush_streams, remember_modules
from distributor.node.process.fork_reset import (
    ProcessAttributes,
    reset_after_fork,
)
from distributor.node.process.specs import WorkerSpec
from distributor.node.process.supervisor import (
    MAX_MESSAGE_BYTES,
    PROCESS_DESCRIPTORS,
    FreshSpawner,
    Interpreter,
    Ready,
    Refused,
    Spawner,
    StartLimit,
    StartRank,
    SupervisedSpawner,
    Supervisor,
    await_message,
    close_inherited,
    is_supported,
    kill_children,
    peer_credentials,
    send,
    start_supervisor,
)
from distributor.source import own_digest

# What every rank needs; an environment may lack torch.
RANK_IMPORTS = ("distributor.node.worker.main", "cloudpickle", "torch", "torch.distributed")
# What the program of a `TorchTrainer` imports, which takes each rank a tenth of a second.
TRAINER_IMPORTS = ("distributor.train.worker_loop",)
# What one that replaces a lost rank needs besides.
REPLACEMENT_IMPORTS = ("distributor.train.torch.loaders", "distributor.train.torch.recovery")
IDLE_IMPORTS = (*TRAINER_IMPORTS, *OPTIMIZER_IMPORTS)
# Seconds without a request after which the next of these is imported. The variable is for tests,
# which start many zygotes: the imports take two CPU seconds in each.
IDLE_IMPORT_SECONDS = float(os.environ.get("DISTRIBUTOR_IDLE_IMPORT_SECONDS", "2"))
# The same for those that take long, while there are supervisors: their ranks use the CPUs.
BUSY_IMPORT_SECONDS = 15 * IDLE_IMPORT_SECONDS
MANY_RUNS = 4  # after which more are likely
IDLE_EXIT_SECONDS = 1800.0
SUPERVISOR_EXIT_SECONDS = 20.0  # to end with the owner: a supervisor that hangs in a fork does not
LOAD_SECONDS = 600  # for the first imports
PREPARE_SECONDS = 600.0  # for the imports while no run waits for them
MAX_ATTEMPTS = 5  # to find a zygote while others start and replace it at the same time
TRACEBACK_CHARS = 4 * 1024  # at each end of a long one: it must fit into a packet

# Prefixes of variables that are read only when an interpreter or a library starts.
_PREFIXES_READ_AT_START = (
    "ATEN_", "BLIS_", "DYLD_", "GLIBC_", "GOMP_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_",
    "NPY_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TORCH_", "VECLIB_",
)  # fmt: skip
# Keeps torch from initializing CUDA when a preloaded module asks whether there is a GPU, because
# CUDA cannot be used in forks of a process that has initialized it.
_CHECK_CUDA_THROUGH_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_STILL_IMPORTS = "does not answer: it is still importing, or hangs"
_HANGS_IN_FORK = (
    "has forked a process that hangs, perhaps in a function that one of them has registered with "
    "os.register_at_fork"
)


@dataclass(frozen=True, kw_only=True)
class PreloadSpec:
    """What a zygote has loaded, and under which conditions."""

    executable: str
    path: tuple[str, ...]
    # The environment variables that only a fresh start would read, with digests of their values:
    # this travels on a command line, which all users can read.
    variables: tuple[tuple[str, str], ...]
    preload: tuple[str, ...]  # the user's modules, in addition to those that every rank needs
    located: tuple[Location, ...]  # of those that an import does not find

    def covers(self, wanted: PreloadSpec) -> bool:
        """Return whether a zygote with this spec can fork ranks that need another spec."""
        return (
            replace(self, preload=(), located=()) == replace(wanted, preload=(), located=())
            and set(wanted.preload) <= set(self.preload)
            and set(wanted.located) <= set(self.located)
        )


@dataclass(frozen=True)
class RequestSupervisor:
    """Asks a zygote to fork a supervisor for ranks that need this to be loaded."""

    preload_spec: PreloadSpec


@dataclass(frozen=True)
class ShutDown:
    """Asks a zygote to end; the runs of its supervisors continue."""


@dataclass(frozen=True)
class Forked:
    """The zygote has forked the supervisor, whose process id this is, and which may yet hang."""

    pid: int


@dataclass(frozen=True)
class Stale:
    """The zygote does not fit and ends; its successor should import these modules too."""

    preload: tuple[str, ...]


# Modification time (ns) and size (bytes) of files, by path.
FileStates = dict[str, tuple[int, int]]


def loaded_files(since: int) -> FileStates:
    """Return the state of the files that this process has imported, and of archives on its path.

    A file that was modified since the imports began, in ns since the epoch, may not be what was
    imported, so its recorded state is one that counts as changed.
    """
    origins = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Of an archive on the path, a list of its content is kept.
    origins |= {getattr(each, "archive", None) for each in list(sys.path_importer_cache.values())}
    files = {path: state for path in origins if path and (state := _state_of(path))}
    now = time.time_ns()
    return {
        path: (0, 0) if since <= modified_at <= now else (modified_at, size)
        for path, (modified_at, size) in files.items()
    }


def have_changed(files: FileStates) -> bool:
    """Return whether any of these files no longer has the recorded state."""
    return any(_state_of(path) != recorded for path, recorded in files.items())


def _state_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class _Imports:
    """Imports modules, and records which environment variables each import has set."""

    def __init__(self) -> None:
        self._start_environment = dict(os.environ)
        self._variables: dict[str, dict[str, str]] = {}  # by module

    def add(self, modules: Sequence[str], optional: str = "") -> str | None:
        """Import modules; return why the first that failed did. The optional package may fail."""
        for name in modules:
            # What is loaded already may have set any of the variables that earlier imports left.
            before = self._start_environment if name in sys.modules else dict(os.environ)
            try:
                importlib.import_module(name)
            except BaseException:  # a module may even exit
                if name.partition(".")[0] != optional:
                    return f"{name} cannot be imported:\n{_shortened(traceback.format_exc())}"
            self._variables.setdefault(name, dict(os.environ.items() - before.items()))
        return None

    def variables(self, modules: Sequence[str]) -> dict[str, str]:
        """Return the variables that are set where only these of the modules are imported."""
        return {k: v for name in modules for k, v in self._variables[name].items()}


def _shortened(text: str) -> str:
    if len(text) <= 2 * TRACEBACK_CHARS:
        return text
    return f"{text[:TRACEBACK_CHARS]}\n...\n{text[-TRACEBACK_CHARS:]}"


def serve(owner: int, listener: int, preload_spec: PreloadSpec) -> WorkerSpec:
    """Run as a zygote. Returns in each rank that descends from it, and nowhere else."""
    set_title(f"zygote for process {owner}", "zygote")
    # `fork_reset` needs it. It sets a variable that torch's libraries read, and ranks do not get.
    importlib.import_module("threadpoolctl")
    return _Zygote(owner, listener, preload_spec).serve()


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


class _Zygote:
    """A zygote, which loads its modules, or fails to, when it is constructed."""

    def __init__(self, owner: int, listener: int, preload_spec: PreloadSpec) -> None:
        self._since, self._imports = time.time_ns(), _Imports()
        with _exit_if_owner_dies(owner):
            find_at(preload_spec.located)
            self._import_error = self._imports.add(
                (*RANK_IMPORTS, *preload_spec.preload), optional="torch"
            )
        set_subreaper()
        self._preload_spec = preload_spec
        self._files: FileStates = {}
        self._parent = os.getppid()
        self._attributes = ProcessAttributes.current()
        self._listener = socket.socket(fileno=listener)
        self._owner = os.pidfd_open(owner)
        self._clients: set[socket.socket] = set()  # that have not sent their request yet
        self._supervisors: dict[int, int] = {}  # pidfds, by process id
        self._num_runs = 0
        self._helpers: set[int] = set()  # children that an imported module has started
        self._idle_imports = list(IDLE_IMPORTS)
        self._replacement_imports = [*IDLE_IMPORTS, *REPLACEMENT_IMPORTS]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._owner, selectors.EVENT_READ, self._exit_with_owner)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._settle()

    def serve(self) -> WorkerSpec:
        """Fork a supervisor for each fitting request. Returns only in the ranks of supervisors."""
        while True:
            events = self._selector.select(self._idle_seconds())
            if not events:
                if not self._idle_imports:
                    os._exit(0)
                self._imports.add([self._idle_imports.pop(0)])
                self._settle()
            for key, _ in events:
                worker_spec: WorkerSpec | None = key.data()
                if worker_spec is not None:
                    return worker_spec

    def _idle_seconds(self) -> float | None:
        if not self._idle_imports:
            return None if self._supervisors else IDLE_EXIT_SECONDS
        if self._num_runs >= MANY_RUNS:
            return 0.0
        takes_long = self._idle_imports[0] not in TRAINER_IMPORTS
        return BUSY_IMPORT_SECONDS if takes_long and self._supervisors else IDLE_IMPORT_SECONDS

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

    def _exit_with_owner(self) -> NoReturn:
        """Exit once the supervisors, which end with the owner too, have ended; kill the rest."""
        deadline = time.monotonic() + SUPERVISOR_EXIT_SECONDS
        for pidfd in self._supervisors.values():
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        if self._supervisors:
            kill_children(lambda child: child not in self._helpers)
        os._exit(0)

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
                os._exit(0)
            if isinstance(message, RequestSupervisor):
                return self._handle_request(client, message.preload_spec)
        return None

    def _handle_request(self, client: socket.socket, wanted: PreloadSpec) -> WorkerSpec | None:
        if self._import_error is not None:
            self._reply_and_exit(client, Refused(self._import_error))
        fits = self._preload_spec.covers(wanted) and not have_changed(self._files)
        if not fits or self._is_outside_of_container():
            # The next zygote should import the same modules too: other runs may need them.
            is_alike = wanted.executable == self._preload_spec.executable
            self._reply_and_exit(client, Stale(self._preload_spec.preload if is_alike else ()))
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
        os._exit(0)

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
                kill(pid)
            self._num_runs += 1
            self._supervisors[pid] = pidfd = os.pidfd_open(pid)
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._handle_end(pid))
            return None
        close_inherited(self._selector, keep=self._owner)
        try:
            start = partial(self._fork_rank, preload)
            supervisor = Supervisor(agent, start, self._owner, self._prepare_replacement)
        except OSError:
            os._exit(1)  # the agent has died
        return supervisor.serve()

    def _prepare_replacement(self) -> bool:
        """Import a module that a rank in the place of a lost one needs; runs in a supervisor."""
        self._imports.add([self._replacement_imports.pop(0)])
        self._settle()
        return bool(self._replacement_imports)

    def _fork_rank(
        self, preload: tuple[str, ...], request: StartRank, descriptors: list[int]
    ) -> tuple[int, WorkerSpec | None]:
        """Fork a rank; runs in a supervisor."""
        supervisor, pid = os.getpid(), _fork()
        if pid:
            return pid, None
        set_by_imports = self._imports.variables((*RANK_IMPORTS, *preload))
        own_descriptors = descriptors[:PROCESS_DESCRIPTORS]
        reset_after_fork(self._attributes, request.attributes, set_by_imports, own_descriptors)
        spec_descriptors = descriptors[PROCESS_DESCRIPTORS:]
        worker_spec = request.worker_spec.with_descriptors(spec_descriptors, supervisor)
        return 0, replace(worker_spec, has_preloads=bool(preload))

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


@dataclass(frozen=True, kw_only=True)
class ZygoteSpec:
    """Which zygote a client wants, and what it must have loaded."""

    owner: int  # the process that it belongs to, and ends with
    environment: Mapping[str, str]  # that its ranks have in every run
    preload: tuple[str, ...] = ()  # modules of the user's, in addition to torch
    interpreter: Interpreter = field(default_factory=Interpreter.current)

    @property
    def preload_spec(self) -> PreloadSpec:
        variables = (
            (name, hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:16])
            for name, value in self.environment.items()
            # A forked rank can apply the number of threads later.
            if name.startswith(_PREFIXES_READ_AT_START) and name != THREADS_VARIABLE
        )
        return PreloadSpec(
            executable=self.interpreter.executable,
            path=self.interpreter.path,
            variables=tuple(sorted(variables)),
            preload=self.preload,
            located=tuple(dict.fromkeys(not_on_path(self.preload))),
        )


def open_spawner(
    zygote_spec: ZygoteSpec | None, limit: StartLimit, interpreter: Interpreter
) -> Spawner:
    """Return a spawner whose ranks are forked from a zygote or, without a spec, fresh interpreters.

    If no zygote can be used, a message is printed and the ranks are started in fresh interpreters.
    """
    if not is_supported():
        return FreshSpawner(interpreter)
    if zygote_spec is not None:
        try:
            return _request_supervisor(zygote_spec, limit)
        except TimeoutError as error:
            modules = ", ".join(("torch", *zygote_spec.preload))
            raise StartTimeout(
                f"start_timeout has passed, and the warm process on {host_name()}, which imports "
                f"{modules}, {error}."
            ) from None
        except OSError as error:
            text = f"no warm process, so ranks start in new interpreters: {error}"
            print(f"distributor: {text}", file=sys.stderr)
    return start_supervisor(interpreter, limit)


_last_prepared: PreloadSpec | None = None


def prepare(zygote_spec: ZygoteSpec) -> None:
    """Start a fitting zygote in the background, if none is there."""
    global _last_prepared
    if not is_supported():
        return
    preload_spec = zygote_spec.preload_spec
    with contextlib.suppress(OSError):  # a run that needs the zygote will report the error
        if not start_if_missing(zygote_spec) and preload_spec != _last_prepared:
            threading.Thread(target=_replace_if_stale, args=(zygote_spec,), daemon=True).start()
        _last_prepared = preload_spec


def start_if_missing(zygote_spec: ZygoteSpec) -> bool:
    """Start a zygote unless its owner has one, which need not fit; return whether it had none."""
    if running := _connect(zygote_spec.owner):
        running.close()
        return False
    if started := _start_zygote(zygote_spec):
        started.close()
    return True


def _replace_if_stale(zygote_spec: ZygoteSpec) -> None:
    limit = StartLimit(time.monotonic() + PREPARE_SECONDS)
    with contextlib.suppress(OSError, DistributorError), _request_supervisor(zygote_spec, limit):
        pass  # its exit ends the supervisor


def is_warm(owner: int) -> bool:
    """Return whether a process has a zygote."""
    with contextlib.suppress(OSError):
        if is_supported() and (connection := _connect(owner)):
            connection.close()
            return True
    return False


def shut_down(owner: int) -> None:
    """End a process's zygote, if there is one. The runs of its supervisors continue."""
    with contextlib.suppress(OSError):
        if is_supported() and (connection := _connect(owner)):
            with connection:
                send(connection, ShutDown())


def _request_supervisor(zygote_spec: ZygoteSpec, limit: StartLimit) -> SupervisedSpawner:
    """Have a zygote fork a supervisor. One that does not fit replies so and exits, and is replaced.

    Raises `TimeoutError` at the deadline, and `OSError` if there is no zygote.
    """
    exited_at_start = False
    to_start = zygote_spec
    for _ in range(MAX_ATTEMPTS):
        running = _connect(zygote_spec.owner)
        connection = running or _start_zygote(to_start)
        if connection is None:
            continue  # another thread or process has just started one
        reply = _send_request(connection, zygote_spec.preload_spec, limit)
        if isinstance(reply, Ready):
            return SupervisedSpawner(connection, reply.pid, limit)
        connection.close()
        if isinstance(reply, Stale):
            # Other runs may still need what this zygote had loaded. If another caller starts the
            # next one, it fits without that.
            preload = dict.fromkeys((*reply.preload, *to_start.preload))
            to_start = replace(zygote_spec, preload=tuple(preload))
        elif running:
            continue  # it was about to exit, or could not import what another run needs
        elif isinstance(reply, Refused):
            raise DistributorError(f"On {host_name()} {reply.reason}")
        elif exited_at_start:
            raise ConnectionError("it exited while it started")
        else:
            exited_at_start = True  # perhaps it had refused another request first: try once more
    raise ConnectionError(f"found and lost {MAX_ATTEMPTS} of them")


def _send_request(
    connection: socket.socket, preload_spec: PreloadSpec, limit: StartLimit
) -> object:
    """Request a supervisor, and return the reply; None if the zygote has gone."""
    forked = None
    try:
        connection.sendall(pickle.dumps(RequestSupervisor(preload_spec)))
        while isinstance(reply := await_message(connection, limit), Forked):
            forked = reply.pid
    except BaseException as error:
        connection.close()
        if forked is not None:
            kill(forked)
        if isinstance(error, TimeoutError):
            raise TimeoutError(_STILL_IMPORTS if forked is None else _HANGS_IN_FORK) from None
        if isinstance(error, OSError):
            return None
        raise
    return reply


def _connect(owner: int) -> socket.socket | None:
    """Connect to the owner's zygote; return None if it has none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_address(owner))
    except ConnectionRefusedError:
        connection.close()
        return None
    if peer_credentials(connection).uid != os.getuid():
        connection.close()
        raise PermissionError("another user has taken its address")
    return connection


def _start_zygote(zygote_spec: ZygoteSpec) -> socket.socket | None:
    """Start a zygote and connect to it; return None if another was started at the same time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_address(zygote_spec.owner))
        except OSError:
            return None
        listener.listen()
        number = listener.fileno()
        argument = zygote_spec.owner, number, zygote_spec.preload_spec
        environment = {**zygote_spec.environment, **_CHECK_CUDA_THROUGH_NVML}
        zygote_spec.interpreter.start_detached("zygote", argument, number, environment)
        return _connect(zygote_spec.owner)


def _address(owner: int) -> str:
    # In the abstract namespace, which leaves no file. A zygote of another source of this package
    # may not understand our messages, so the name contains the digest.
    started = stat_field(owner, Stat.START_TIME)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0distributor-zygote-{os.getuid()}-{namespace}-{owner}-{started}-{own_digest()}"
