"""What passes between an agent, the zygote that it may ask for a keeper, and that keeper."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
from dataclasses import asdict, dataclass
from typing import NamedTuple

from distributor.node.order import Order
from distributor.node.recipe import Recipe
from distributor.node.surroundings import Surroundings

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
    recipe : Recipe
        What it is to load.
    """

    owner: int
    listener: int
    recipe: Recipe

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, argument: str) -> Birth:
        fields = json.loads(argument)
        recipe = fields["recipe"]
        recipe |= {
            "path": tuple(recipe["path"]),
            "variables": tuple(map(tuple, recipe["variables"])),
            "preload": tuple(recipe["preload"]),
        }
        return cls(**{**fields, "recipe": Recipe(**recipe)})


# What is asked, and what is answered; each is one packet.


@dataclass(frozen=True)
class Hello:
    """Asks a zygote for a keeper; its answer is the keeper's `Ready`, `Stale` or `Trouble`."""

    wanted: Recipe


@dataclass(frozen=True)
class Fork:
    """Asks a keeper for a rank; its answer is `Forked` or `Trouble`.

    With it come descriptors: of its pickled environment, which may be large, its working folder,
    its stdout, its stderr, and those of the order.
    """

    order: Order
    surroundings: Surroundings


@dataclass(frozen=True)
class Retire:
    """Asks the zygote to end; what came of it goes on."""


@dataclass(frozen=True)
class Ready:
    """The keeper can start ranks; `pid` is their parent."""

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
    """Give the next message from a zygote or keeper; None where it has gone."""
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
