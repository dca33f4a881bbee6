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

A rank that was forked leaves this module: `Supervisor.serve` returns in it. The agent's side is
`SupervisedSpawner`, or `FreshSpawner` on systems without supervisors. Each message is one packet.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import pickle
import queue
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO, NamedTuple, NoReturn

from distributor.core import processes
from distributor.core.addresses import host_name
from distributor.core.files import remove_scratch
from distributor.core.module_search import lasting_path
from distributor.core.threads import MessageQueue
from distributor.errors import DistributorError, StartTimeout
from distributor.node.process.fork_reset import ProcessAttributes, read_environment
from distributor.node.process.specs import WorkerSpec
from distributor.serialization.oob_pickle import anonymous_file

MAX_MESSAGE_BYTES = 64 * 1024
PROCESS_DESCRIPTORS = 4  # of a `StartRank`, before those of the spec
MAX_DESCRIPTORS = 16
KILL_SECONDS = 10.0  # after which descendants stay that hang in the kernel, and cannot be killed
READY_SECONDS = 60.0  # that a new interpreter has to become a supervisor, which imports little
PREPARE_SECONDS = 2.0  # without a message, after which later starts are prepared
SHUTDOWN_SECONDS = 10.0  # that a supervisor has to end its descendants before it is killed

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


def is_supported() -> bool:
    """Return whether this system has what supervisors and zygotes need, as macOS has not."""
    return not processes.lacking_for_supervision()


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
        argument: object,
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        stdout: int | BinaryIO = subprocess.DEVNULL,
        stderr: int | BinaryIO = subprocess.DEVNULL,
        folder: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start it as a "rank", "supervisor" or "zygote", in a session of its own."""
        packed = base64.b64encode(pickle.dumps(argument)).decode()
        return subprocess.Popen(
            [self.executable, "-c", BOOT, role, packed, json.dumps(self.path)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            pass_fds=descriptors,
            start_new_session=True,
            env=environment,
        )

    def start_detached(
        self, role: str, argument: object, descriptor: int, environment: Mapping[str, str]
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


@dataclass(frozen=True)
class Ready:
    """The supervisor, whose process id this is, can start ranks."""

    pid: int


@dataclass(frozen=True)
class StartRank:
    """Asks a supervisor to start a rank.

    Descriptors come with it: of the pickled environment, which may be large, the working folder,
    stdout, stderr, and then those of the spec.
    """

    worker_spec: WorkerSpec
    attributes: ProcessAttributes


@dataclass(frozen=True)
class RankStarted:
    pid: int


@dataclass(frozen=True)
class RankEnded:
    pid: int
    returncode: int


@dataclass(frozen=True)
class Refused:
    """The request could not be carried out."""

    reason: str


class PeerCredentials(NamedTuple):
    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Return which process created the other end of a local socket, according to the kernel."""
    layout = struct.Struct("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return PeerCredentials(*layout.unpack(credentials))


def send(connection: socket.socket, message: object) -> None:
    """Send a message, unless the peer has gone."""
    with contextlib.suppress(OSError):
        connection.sendall(pickle.dumps(message))


def receive(connection: socket.socket) -> object:
    """Return the next message; None if the peer has gone."""
    try:
        data = connection.recv(MAX_MESSAGE_BYTES)
    except TimeoutError:
        raise
    except OSError:
        return None
    return pickle.loads(data) if data else None


def await_message(connection: socket.socket, limit: StartLimit) -> object:
    """Return the next message as `receive`, or raise `TimeoutError` at the limit's deadline."""
    for seconds in limit.intervals():
        connection.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            message = receive(connection)
            connection.settimeout(None)
            return message
    raise TimeoutError


# Starts a rank with these descriptors; returns its process id or, in a forked rank, its spec.
Start = Callable[[StartRank, list[int]], "tuple[int, WorkerSpec | None]"]


class Supervisor:
    """Starts ranks for one agent, and leaves none of their processes behind.

    `owner` is the pidfd of another process with which it ends. `prepare` does a part of what makes
    a later start quicker, and returns whether there is more to do.
    """

    def __init__(
        self,
        agent: socket.socket,
        start: Start,
        owner: int | None = None,
        prepare: Callable[[], bool] = lambda: False,
    ) -> None:
        processes.set_subreaper()
        self._prepare = prepare
        self._has_to_prepare = False  # for ranks that replace others
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
            events = self._selector.select(PREPARE_SECONDS if self._has_to_prepare else None)
            if not events:
                self._has_to_prepare = self._prepare()
            for key, _ in events:
                worker_spec: WorkerSpec | None = key.data()
                if worker_spec is not None:
                    return worker_spec

    def _handle_message(self) -> WorkerSpec | None:
        message, descriptors = self._receive()
        if not self._scratches:
            share = message.worker_spec.share
            processes.set_run_title("supervisor", share.program_name, share.run_id)
            self._has_to_prepare = share.goes_on
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
        self._pidfds[pid] = pidfd = os.pidfd_open(pid)
        self._scratches[pid] = message.worker_spec.scratch
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._handle_end(pid))
        send(self._agent, RankStarted(pid))
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

    def _handle_end(self, pid: int) -> None:
        """Report how a rank ended, once the rest of its process group has ended too."""
        # The rank is not reaped yet, so its id cannot have become that of another process group.
        kill_children(
            lambda child: child not in self._pidfds and processes.process_group_of(child) == pid
        )
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        send(self._agent, RankEnded(pid, os.waitstatus_to_exitcode(status)))

    def _shut_down(self) -> NoReturn:
        """End all that still runs, and exit."""
        for pid in self._pidfds:
            processes.kill(pid)
        self._pidfds.clear()
        kill_children(lambda child: True)
        for scratch in self._scratches.values():
            remove_scratch(scratch)
        # Closed explicitly, so that the agent need not wait until the kernel has freed our memory.
        self._agent.close()
        os._exit(0)


def serve_fresh(descriptor: int) -> NoReturn:
    """Run as the supervisor of ranks that each have an interpreter of their own."""
    agent = socket.socket(fileno=descriptor)
    agent.set_inheritable(False)
    Supervisor(agent, _execute_rank).serve()
    raise AssertionError("only forked ranks return, and none was forked")


def _execute_rank(request: StartRank, descriptors: list[int]) -> tuple[int, None]:
    environment, folder, stdout, stderr, *spec_descriptors = descriptors
    worker_spec = request.worker_spec.with_descriptors(spec_descriptors, os.getpid())
    variables, place = read_environment(environment), f"/proc/self/fd/{folder}"
    child = Interpreter.current().start(
        "rank", worker_spec, spec_descriptors, variables, stdout, stderr, place
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
    while doomed := [child for child in processes.child_pids() if is_doomed(child)]:
        to_kill = [child for child in doomed if not processes.is_resource_tracker(child)]
        limit = KILL_SECONDS if to_kill else processes.RESOURCE_TRACKER_SECONDS
        if time.monotonic() > began + limit:
            return
        for child in to_kill:
            processes.kill(child)
        for child in doomed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(processes.POLL_SECONDS)


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
            processes.signal_group(self.pid, signal.SIGTERM)
            if processes.ignores_signal(self.pid, signal.SIGTERM):
                self.kill()

    def kill(self) -> None:
        """Kill the process. Its parent kills the rest of its process group."""
        if self.running:
            processes.kill(self.pid)

    def record_end(self, returncode: int) -> None:
        self.returncode = returncode
        self._on_end()
        self._ended.set()

    def join(self, seconds: float) -> bool:
        """Wait until the process has ended; return False if it has not ended in time."""
        return self._ended.wait(seconds)


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
            processes.kill_by_environment(self._run_variables)

    def extend_limit(self) -> None:
        """Do nothing: the start of a rank is not waited for."""

    def start(
        self,
        worker_spec: WorkerSpec,
        environment: Mapping[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
        on_end: Callable[[], object],
    ) -> Process:
        """Start a rank; `on_end` is called once when it has ended, on any thread."""
        self._run_variables = {name: environment[name] for name in RUN_VARIABLES}
        child = self._interpreter.start(
            "rank", worker_spec, worker_spec.descriptors(), environment, stdout, stderr
        )
        process = Process(child.pid, on_end)
        threading.Thread(target=_await_end, args=(child, process), daemon=True).start()
        return process


def _await_end(child: subprocess.Popen[bytes], process: Process) -> None:
    with contextlib.suppress(AttributeError, OSError):  # macOS has waitid since Python 3.13
        # Until the child is reaped, its id cannot become that of another process group.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        processes.signal_group(child.pid, signal.SIGKILL)
    process.record_end(child.wait())


def start_supervisor(interpreter: Interpreter, limit: StartLimit) -> SupervisedSpawner:
    """Start a supervisor whose ranks each get a new interpreter of the same kind."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {**os.environ, **interpreter.variables}
        number = theirs.fileno()
        pid = interpreter.start_detached("supervisor", number, number, environment)
    deadline = min(limit.deadline, time.monotonic() + READY_SECONDS)
    try:
        reply = await_message(ours, replace(limit, deadline=deadline))
    except BaseException as error:
        processes.kill(pid)
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
        ours.close()
        raise DistributorError(
            f"{interpreter.executable} could not be started as the supervisor of ranks."
        )
    return SupervisedSpawner(ours, pid, limit)


class SupervisedSpawner:
    """Has a supervisor, which is ready, start each rank."""

    def __init__(self, connection: socket.socket, supervisor: int, limit: StartLimit) -> None:
        self._connection = connection
        self._supervisor_pid = supervisor
        self._limit = limit
        self._attributes = ProcessAttributes.current()
        self._processes: dict[int, Process] = {}
        self._replies: MessageQueue[RankStarted | Refused] = MessageQueue()
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
            processes.kill(self._supervisor_pid)
            self._reader.join()
        self._connection.close()

    def extend_limit(self) -> None:
        """Allow a rank to start although ``start_timeout`` has passed."""
        self._limit = replace(self._limit, deadline=time.monotonic() + READY_SECONDS)

    def start(
        self,
        worker_spec: WorkerSpec,
        environment: Mapping[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
        on_end: Callable[[], object],
    ) -> Process:
        """Start a rank; `on_end` is called once when it has ended, on any thread."""
        self._on_end = on_end
        self._run_variables = {name: environment[name] for name in RUN_VARIABLES}
        request = pickle.dumps(StartRank(worker_spec, self._attributes))
        folder = os.open(".", os.O_PATH)
        with anonymous_file() as file:
            pickle.dump(dict(environment), file)
            file.flush()
            descriptors = [file.fileno(), folder, stdout.fileno(), stderr.fileno()]
            descriptors += worker_spec.descriptors()
            with contextlib.suppress(OSError):  # the reader notices that the supervisor has gone
                socket.send_fds(self._connection, [request], descriptors)
        os.close(folder)
        try:
            reply = self._next_reply()
        except BaseException:
            processes.kill(self._supervisor_pid)  # it would not end the ranks that it has started
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
            processes.kill_group(rank.pid)
        processes.kill_by_environment(self._run_variables)
        for rank in ranks:
            rank.record_end(-signal.SIGKILL)


Spawner = FreshSpawner | SupervisedSpawner
"""Starts processes that end within its context."""
