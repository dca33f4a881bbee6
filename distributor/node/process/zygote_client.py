"""Finds or starts this node's zygote, and requests supervisors from it."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distributor.core.host import host_name
from distributor.errors import DistributorError, StartTimeout
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.ipc import (
    Birth,
    Hello,
    Ready,
    Retire,
    Stale,
    Trouble,
    peer_of,
    receive,
)
from distributor.node.process.preload_spec import PreloadSpec
from distributor.node.process.spawner import FreshSpawner, Spawner
from distributor.node.process.supervisor_client import (
    SupervisedSpawner,
    SupervisorConnection,
    fresh_supervisor,
    is_supported,
)
from distributor.source import own_digest

ZYGOTE_SECONDS = 600.0
"""Seconds that a zygote may take to import what it needs, where no run waits for it."""
_prepared: list[PreloadSpec] = []
"""What was prepared last: for the same again nobody need be asked."""
ATTEMPTS = 5
"""How often a zygote is looked for, while others start and replace it at the same time."""
_SPARE_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""A module that asks CUDA itself whether there is a GPU would spoil it for all that is forked."""


@dataclass(frozen=True, kw_only=True)
class ZygoteSpec:
    """Whose zygote is wanted, and what it must have loaded.

    Parameters
    ----------
    owner : int
        The process that it belongs to, and ends with.
    environment : mapping of str to str
        What ranks find in theirs, whatever the run.
    preload : tuple of str
        Modules of the user's that it imports beside torch.
    interpreter : Interpreter
        What it runs with; by default what this process does.
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
    deadline: float = math.inf,
    interpreter: Interpreter | None = None,
) -> Spawner:
    """Give what starts ranks: a supervisor that forks them, or one that starts fresh interpreters.

    Parameters
    ----------
    zygote_spec : ZygoteSpec or None
        What a zygote is to have ready; None for fresh interpreters.
    deadline : float
        When, by ``time.monotonic``, it must be ready.
    interpreter : Interpreter, optional
        What fresh ranks run with; by default what this process does.

    Raises
    ------
    DistributorError
        Where a module of the user's cannot be preloaded.
    StartTimeout
        Where the deadline passed.
    """
    interpreter = interpreter or Interpreter.current()
    if not is_supported():
        return FreshSpawner(interpreter)
    if zygote_spec is None:
        return SupervisedSpawner(fresh_supervisor(interpreter))
    try:
        return SupervisedSpawner(_connect(zygote_spec, deadline))
    except TimeoutError as error:
        modules = ", ".join(("torch", *zygote_spec.preload))
        raise StartTimeout(
            f"After start_timeout, the warm process on {host_name()} still imports {modules}."
        ) from error
    except OSError as error:
        print(f"distributor: no warm process, ranks start fresh: {error}", file=sys.stderr)
        return SupervisedSpawner(fresh_supervisor(interpreter))


def prepare(zygote_spec: ZygoteSpec | None) -> None:
    """See to it that a zygote that fits, if one is wanted, is on its way; does not wait for it."""
    if zygote_spec is None or not is_supported():
        return
    preload_spec = zygote_spec.preload_spec
    with contextlib.suppress(OSError):  # whoever needs it later will hear of it
        if found := _dial(zygote_spec.owner):
            found.close()
            if preload_spec not in _prepared:
                threading.Thread(target=_refresh, args=(zygote_spec,), daemon=True).start()
        elif born := _bear(zygote_spec):
            born.close()
        _prepared[:] = [preload_spec]


def _refresh(zygote_spec: ZygoteSpec) -> None:
    with contextlib.suppress(OSError, DistributorError):
        _connect(zygote_spec, time.monotonic() + ZYGOTE_SECONDS).connection.close()


def is_warm(owner: int) -> bool:
    """Return whether the owner has a warm process."""
    with contextlib.suppress(OSError):
        if is_supported() and (connection := _dial(owner)):
            connection.close()
            return True
    return False


def shut_down(owner: int) -> None:
    """Let the owner's zygote end, if there is one; runs that came of it go on."""
    with contextlib.suppress(OSError):
        if is_supported() and (connection := _dial(owner)):
            with connection:
                connection.sendall(pickle.dumps(Retire()))


def _connect(zygote_spec: ZygoteSpec, deadline: float) -> SupervisorConnection:
    """Connect to a supervisor that the zygote has forked."""
    lost = False
    for _ in range(ATTEMPTS):
        found = _dial(zygote_spec.owner)
        connection = found or _bear(zygote_spec)
        if connection is None:
            continue  # another has just started one
        answer = _ask(connection, zygote_spec.preload_spec, deadline)
        if isinstance(answer, Ready):
            return SupervisorConnection(connection, answer.pid)
        connection.close()
        if isinstance(answer, Stale):  # others may still want what it had
            preload = dict.fromkeys((*answer.preload, *zygote_spec.preload))
            zygote_spec = replace(zygote_spec, preload=tuple(preload))
        elif found:
            continue  # it was about to end, or was made of what cannot be loaded
        elif isinstance(answer, Trouble):
            raise DistributorError(f"On {host_name()} {answer.text}")
        elif lost:
            raise ConnectionError("it ended as it started")
        else:
            lost = True  # perhaps only after it had told another of its trouble
    raise ConnectionError(f"found and lost {ATTEMPTS} of them")


def _ask(connection: socket.socket, preload_spec: PreloadSpec, deadline: float) -> object:
    """Ask a zygote whether it fits; None where it has gone."""
    try:
        connection.sendall(pickle.dumps(Hello(preload_spec)))
        left = deadline - time.monotonic()
        connection.settimeout(max(0.001, left) if left < math.inf else None)
        answer = receive(connection)
        connection.settimeout(None)
    except TimeoutError:
        connection.close()
        raise
    except OSError:
        return None
    return answer


def _dial(owner: int) -> socket.socket | None:
    """Connect to the owner's zygote; None where it has none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_name(owner))
    except ConnectionRefusedError:
        connection.close()
        return None
    if peer_of(connection).uid != os.getuid():
        connection.close()
        raise PermissionError("another user has taken its name")
    return connection


def _bear(zygote_spec: ZygoteSpec) -> socket.socket | None:
    """Start a zygote and connect to it; None where one was started at the same time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_name(zygote_spec.owner))
        except OSError:
            return None
        listener.listen()
        birth = Birth(zygote_spec.owner, listener.fileno(), zygote_spec.preload_spec)
        environment = {**zygote_spec.environment, **_SPARE_CUDA}
        zygote_spec.interpreter.start_detached(
            "zygote", birth.to_argument(), listener.fileno(), environment
        )
        return _dial(zygote_spec.owner)


def _name(owner: int) -> str:
    """Name the owner's zygote, in the abstract namespace, which leaves no file behind.

    One of another source of this package has another name: it may not understand this one.
    """
    status = Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()
    started, namespace = status[19], os.stat("/proc/self/ns/pid").st_ino
    return f"\0distributor-zygote-{os.getuid()}-{namespace}-{owner}-{started}-{own_digest()}"
