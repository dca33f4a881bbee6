"""Finds or starts a process's zygote, and requests supervisors from it."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distributor.core.host import host_name
from distributor.core.procfs import Stat, stat_field
from distributor.errors import DistributorError, StartTimeout
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.ipc import (
    Forked,
    Ready,
    Refused,
    RequestSupervisor,
    ShutDown,
    Stale,
    ZygoteArguments,
    await_message,
    peer_credentials,
    send,
)
from distributor.node.process.preload_spec import PreloadSpec
from distributor.node.process.spawner import FreshSpawner, Spawner
from distributor.node.process.start_limit import StartLimit
from distributor.node.process.supervisor_client import (
    SupervisedSpawner,
    SupervisorConnection,
    is_supported,
    kill,
    start_supervisor,
)
from distributor.source import own_digest

PREPARE_SECONDS = 600.0
"""Seconds that a zygote may take to import what it needs while no run waits for it."""
MAX_ATTEMPTS = 5
"""How often a zygote is looked up while others start and replace it at the same time."""
_CHECK_CUDA_THROUGH_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Keeps torch from initializing CUDA when a preloaded module asks whether there is a GPU, because
CUDA cannot be used in forks of a process that has initialized it."""
_STILL_IMPORTS = "does not answer: it is still importing, or hangs"
_HANGS_IN_FORK = (
    "has forked a process that hangs, perhaps in a function that one of them has registered with "
    "os.register_at_fork"
)
_last_prepared: PreloadSpec | None = None


@dataclass(frozen=True, kw_only=True)
class ZygoteSpec:
    """Which zygote is wanted, and what it must have loaded.

    Parameters
    ----------
    owner : int
        The process that the zygote belongs to, and ends with.
    environment : mapping of str to str
        The variables that its ranks have in every run.
    preload : tuple of str
        Modules of the user's that it imports in addition to torch.
    interpreter : Interpreter
        Its interpreter; by default that of this process.
    """

    owner: int
    environment: Mapping[str, str]
    preload: tuple[str, ...] = ()
    interpreter: Interpreter = field(default_factory=Interpreter.current)

    @property
    def preload_spec(self) -> PreloadSpec:
        return PreloadSpec.of(self.environment, self.preload, self.interpreter)


def open_spawner(
    zygote_spec: ZygoteSpec | None,
    limit: StartLimit,
    interpreter: Interpreter | None = None,
) -> Spawner:
    """Return a spawner whose ranks are forked from a zygote or started in fresh interpreters.

    If no zygote can be used, a message is printed and the ranks are started in fresh interpreters.

    Parameters
    ----------
    zygote_spec : ZygoteSpec or None
        What a zygote must have loaded; None for fresh interpreters.
    limit : StartLimit
        How long the start of all ranks is waited for.
    interpreter : Interpreter, optional
        The interpreter of fresh ranks; by default that of this process.

    Raises
    ------
    DistributorError
        If one of the user's modules cannot be preloaded, or no supervisor can be started.
    StartTimeout
        If the deadline has passed.
    """
    interpreter = interpreter or Interpreter.current()
    if not is_supported():
        return FreshSpawner(interpreter)
    if zygote_spec is None:
        return SupervisedSpawner(start_supervisor(interpreter, limit), limit)
    try:
        return SupervisedSpawner(_request_supervisor(zygote_spec, limit), limit)
    except TimeoutError as error:
        modules = ", ".join(("torch", *zygote_spec.preload))
        raise StartTimeout(
            f"start_timeout has passed, and the warm process on {host_name()}, which imports "
            f"{modules}, {error}."
        ) from None
    except OSError as error:
        print(
            f"distributor: no warm process, so ranks start in new interpreters: {error}",
            file=sys.stderr,
        )
        return SupervisedSpawner(start_supervisor(interpreter, limit), limit)


def prepare(zygote_spec: ZygoteSpec | None) -> None:
    """Start a fitting zygote in the background, if one is wanted and none is there."""
    global _last_prepared
    if zygote_spec is None or not is_supported():
        return
    preload_spec = zygote_spec.preload_spec
    with contextlib.suppress(OSError):  # a run that needs the zygote will report the error
        if not start_if_missing(zygote_spec) and preload_spec != _last_prepared:
            threading.Thread(target=_replace_if_stale, args=(zygote_spec,), daemon=True).start()
        _last_prepared = preload_spec


def start_if_missing(zygote_spec: ZygoteSpec) -> bool:
    """Start a zygote unless its owner has one, which need not fit; return whether it had none.

    Raises
    ------
    OSError
        If none can be started.
    """
    if running := _connect(zygote_spec.owner):
        running.close()
        return False
    if started := _start_zygote(zygote_spec):
        started.close()
    return True


def _replace_if_stale(zygote_spec: ZygoteSpec) -> None:
    with contextlib.suppress(OSError, DistributorError):
        limit = StartLimit(time.monotonic() + PREPARE_SECONDS)
        _request_supervisor(zygote_spec, limit).connection.close()


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


def _request_supervisor(zygote_spec: ZygoteSpec, limit: StartLimit) -> SupervisorConnection:
    """Have a zygote fork a supervisor, and return the connection to it.

    A zygote that does not fit replies so and exits, and is replaced.

    Raises
    ------
    DistributorError
        If a zygote that was started here could not import a module or fork.
    TimeoutError
        If the deadline has passed.
    OSError
        If there is no zygote, and none can be started.
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
            return SupervisorConnection(connection, reply.pid)
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
    """Request a supervisor, and return the reply; None if the zygote has gone.

    Raises
    ------
    TimeoutError
        If the deadline has passed; says what the zygote was doing.
    """
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
        arguments = ZygoteArguments(zygote_spec.owner, listener.fileno(), zygote_spec.preload_spec)
        environment = {**zygote_spec.environment, **_CHECK_CUDA_THROUGH_NVML}
        zygote_spec.interpreter.start_detached(
            "zygote", arguments.to_argument(), listener.fileno(), environment
        )
        return _connect(zygote_spec.owner)


def _address(owner: int) -> str:
    """Return the address of the owner's zygote, in the abstract namespace, which leaves no file.

    It contains the digest of this package's source, because a zygote of another source may not
    understand our messages.
    """
    started = stat_field(owner, Stat.START_TIME)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0distributor-zygote-{os.getuid()}-{namespace}-{owner}-{started}-{own_digest()}"
