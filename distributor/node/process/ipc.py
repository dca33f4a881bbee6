"""Messages between an agent, the zygote that it may ask for a supervisor, and the supervisor."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
from dataclasses import asdict, dataclass
from typing import NamedTuple

from distributor.node.process.preload_spec import PreloadSpec
from distributor.node.process.process_attributes import ProcessAttributes
from distributor.node.process.worker_spec import WorkerSpec

MAX_MESSAGE = 64 * 1024
"""Bytes of a packet."""


@dataclass(frozen=True)
class Birth:
    """What a zygote is told at its start.

    Parameters
    ----------
    owner : int
        The process with which it ends.
    listener : int
        The descriptor of its listening socket.
    preload_spec : PreloadSpec
        What it is to load.
    """

    owner: int
    listener: int
    preload_spec: PreloadSpec

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, argument: str) -> Birth:
        fields = json.loads(argument)
        preload_spec = fields["preload_spec"]
        preload_spec |= {
            "path": tuple(preload_spec["path"]),
            "variables": tuple(map(tuple, preload_spec["variables"])),
            "preload": tuple(preload_spec["preload"]),
        }
        return cls(**{**fields, "preload_spec": PreloadSpec(**preload_spec)})


# What is asked, and what is answered; each is one packet.


@dataclass(frozen=True)
class Hello:
    """Asks a zygote for a supervisor, which answers `Ready`, `Stale` or `Trouble`."""

    wanted: PreloadSpec


@dataclass(frozen=True)
class Fork:
    """Asks a supervisor for a rank; its answer is `Forked` or `Trouble`.

    With it come descriptors: of its pickled environment, which may be large, its working folder,
    its stdout, its stderr, and those of the spec.
    """

    worker_spec: WorkerSpec
    attributes: ProcessAttributes


@dataclass(frozen=True)
class Retire:
    """Asks the zygote to end; what came of it goes on."""


@dataclass(frozen=True)
class Ready:
    """The supervisor can start ranks; `pid` is their parent."""

    pid: int


@dataclass(frozen=True)
class Stale:
    """The zygote does not fit, and ends; what it had preloaded may be wanted again."""

    preload: tuple[str, ...]


@dataclass(frozen=True)
class Trouble:
    """What was asked for could not be done."""

    text: str


@dataclass(frozen=True)
class Forked:
    """A rank runs."""

    pid: int


@dataclass(frozen=True)
class Ended:
    """A rank has ended."""

    pid: int
    returncode: int


class Peer(NamedTuple):
    """Who is at the other end of a local socket."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Ask the kernel who made the other end of a local socket."""
    layout = struct.Struct("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return Peer(*layout.unpack(credentials))


def say(connection: socket.socket, message: object) -> None:
    """Send a message; whoever has gone does not get it."""
    with contextlib.suppress(OSError):
        connection.sendall(pickle.dumps(message))


def receive(connection: socket.socket) -> object:
    """Give the next message from a zygote or supervisor; None where it has gone."""
    try:
        data = connection.recv(MAX_MESSAGE)
    except TimeoutError:
        raise
    except OSError:
        return None
    return pickle.loads(data) if data else None


def environment_in(descriptor: int) -> dict[str, str]:
    """Read the environment that came with a `Fork`."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        variables: dict[str, str] = pickle.load(file)
    return variables
