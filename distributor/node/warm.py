"""The way to this node's zygote: found or started, and asked for keepers."""

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

from distributor.errors import DistributorError, StartTimeout
from distributor.node.asking import (
    Birth,
    Hello,
    Ready,
    Retire,
    Stale,
    Trouble,
    peer_of,
    receive,
)
from distributor.node.host import host_name
from distributor.node.interpreter import Interpreter
from distributor.node.kept import Kept, KeptStarter, fresh_keeper, is_supported
from distributor.node.processes import FreshStarter, Starter
from distributor.node.recipe import Recipe
from distributor.source import own_digest

ZYGOTE_SECONDS = 600.0
"""Seconds that a zygote may take to import what it needs, where no run waits for it."""
_prepared: list[Recipe] = []
"""What was prepared last: for the same again nobody need be asked."""
ATTEMPTS = 5
"""How often a zygote is looked for, while others start and replace it at the same time."""
_SPARE_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""A module that asks CUDA itself whether there is a GPU would spoil it for all that is forked."""


@dataclass(frozen=True, kw_only=True)
class Warmth:
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
    interpreter: Interpreter = field(default_factory=Interpreter.here)

    @property
    def recipe(self) -> Recipe:
        return Recipe.of(self.environment, self.preload, self.interpreter)


def starter(
    warmth: Warmth | None, deadline: float = math.inf, interpreter: Interpreter | None = None
) -> Starter:
    """Give what starts ranks: a keeper that forks them, or one that starts fresh interpreters.

    Parameters
    ----------
    warmth : Warmth or None
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
    interpreter = interpreter or Interpreter.here()
    if not is_supported():
        return FreshStarter(interpreter)
    if warmth is None:
        return KeptStarter(fresh_keeper(interpreter))
    try:
        return KeptStarter(_connect(warmth, deadline))
    except TimeoutError as error:
        modules = ", ".join(("torch", *warmth.preload))
        raise StartTimeout(
            f"After start_timeout, the warm process on {host_name()} still imports {modules}."
        ) from error
    except OSError as error:
        print(f"distributor: no warm process, ranks start fresh: {error}", file=sys.stderr)
        return KeptStarter(fresh_keeper(interpreter))


def prepare(warmth: Warmth | None) -> None:
    """See to it that a zygote that fits, if one is wanted, is on its way; does not wait for it."""
    if warmth is None or not is_supported():
        return
    recipe = warmth.recipe
    with contextlib.suppress(OSError):  # whoever needs it later will hear of it
        if found := _dial(warmth.owner):
            found.close()
            if recipe not in _prepared:
                threading.Thread(target=_refresh, args=(warmth,), daemon=True).start()
        elif born := _bear(warmth):
            born.close()
        _prepared[:] = [recipe]


def _refresh(warmth: Warmth) -> None:
    with contextlib.suppress(OSError, DistributorError):
        _connect(warmth, time.monotonic() + ZYGOTE_SECONDS).connection.close()


def is_warm(owner: int) -> bool:
    """Return whether the owner has a warm process."""
    with contextlib.suppress(OSError):
        if is_supported() and (connection := _dial(owner)):
            connection.close()
            return True
    return False


def retire(owner: int) -> None:
    """Let the owner's zygote end, if there is one; runs that came of it go on."""
    with contextlib.suppress(OSError):
        if is_supported() and (connection := _dial(owner)):
            with connection:
                connection.sendall(pickle.dumps(Retire()))


def _connect(warmth: Warmth, deadline: float) -> Kept:
    """Connect to a keeper that the zygote has forked."""
    lost = False
    for _ in range(ATTEMPTS):
        found = _dial(warmth.owner)
        connection = found or _bear(warmth)
        if connection is None:
            continue  # another has just started one
        answer = _ask(connection, warmth.recipe, deadline)
        if isinstance(answer, Ready):
            return Kept(connection, answer.pid)
        connection.close()
        if isinstance(answer, Stale):  # others may still want what it had
            preload = dict.fromkeys((*answer.preload, *warmth.preload))
            warmth = replace(warmth, preload=tuple(preload))
        elif found:
            continue  # it was about to end, or was made of what cannot be loaded
        elif isinstance(answer, Trouble):
            raise DistributorError(f"On {host_name()} {answer.text}")
        elif lost:
            raise ConnectionError("it ended as it started")
        else:
            lost = True  # perhaps only after it had told another of its trouble
    raise ConnectionError(f"found and lost {ATTEMPTS} of them")


def _ask(connection: socket.socket, recipe: Recipe, deadline: float) -> object:
    """Ask a zygote whether it fits; None where it has gone."""
    try:
        connection.sendall(pickle.dumps(Hello(recipe)))
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


def _bear(warmth: Warmth) -> socket.socket | None:
    """Start a zygote and connect to it; None where one was started at the same time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_name(warmth.owner))
        except OSError:
            return None
        listener.listen()
        birth = Birth(warmth.owner, listener.fileno(), warmth.recipe)
        environment = {**warmth.environment, **_SPARE_CUDA}
        warmth.interpreter.start_apart(
            "zygote", birth.to_argument(), listener.fileno(), environment
        )
        return _dial(warmth.owner)


def _name(owner: int) -> str:
    """Name the owner's zygote, in the abstract namespace, which leaves no file behind.

    One of another source of this package has another name: it may not understand this one.
    """
    status = Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()
    started, namespace = status[19], os.stat("/proc/self/ns/pid").st_ino
    return f"\0distributor-zygote-{os.getuid()}-{namespace}-{owner}-{started}-{own_digest()}"
