"""Messages between an agent, a zygote and a supervisor.

Each message is one packet. A connection begins at a zygote, which passes it on to the supervisor
that it forks, or at a supervisor that the agent has started itself:

===================  ==========  =================================================
request              to          replies
===================  ==========  =================================================
`RequestSupervisor`  zygote      `Forked` and `Ready` (by the supervisor) in either order, or
                                 `Stale` or `Refused`
`ShutDown`           zygote      none
`StartRank`          supervisor  `RankStarted` and later `RankEnded`, or `Refused`
===================  ==========  =================================================
"""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from distributor.core.module_search import Location
from distributor.node.process.preload_spec import PreloadSpec
from distributor.node.process.process_attributes import ProcessAttributes
from distributor.node.process.start_limit import StartLimit
from distributor.node.process.worker_spec import WorkerSpec

MAX_MESSAGE_BYTES = 64 * 1024
"""Size of the largest packet."""


@dataclass(frozen=True)
class ZygoteArguments:
    """What a zygote gets on its command line.

    Parameters
    ----------
    owner : int
        The process with which the zygote ends.
    listener : int
        The descriptor of its listening socket.
    preload_spec : PreloadSpec
        What it must load.
    """

    owner: int
    listener: int
    preload_spec: PreloadSpec

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, argument: str) -> ZygoteArguments:
        fields = json.loads(argument)
        preload_spec = fields["preload_spec"]
        preload_spec |= {
            "path": tuple(preload_spec["path"]),
            "variables": tuple(map(tuple, preload_spec["variables"])),
            "preload": tuple(preload_spec["preload"]),
            "located": tuple(map(_location, preload_spec["located"])),
        }
        return cls(**{**fields, "preload_spec": PreloadSpec(**preload_spec)})


def _location(fields: dict[str, Any]) -> Location:
    folders = fields["folders"]
    return Location(**{**fields, "folders": None if folders is None else tuple(folders)})


@dataclass(frozen=True)
class RequestSupervisor:
    """Asks a zygote to fork a supervisor for ranks that need this to be loaded."""

    preload_spec: PreloadSpec


@dataclass(frozen=True)
class ShutDown:
    """Asks a zygote to end; the runs of its supervisors continue."""


@dataclass(frozen=True)
class StartRank:
    """Asks a supervisor to start a rank.

    Descriptors come with it: of the pickled environment, which may be large, the working folder,
    stdout, stderr, and then those of the spec.
    """

    worker_spec: WorkerSpec
    attributes: ProcessAttributes


@dataclass(frozen=True)
class Forked:
    """The zygote has forked the supervisor, whose process id this is, and which may yet hang."""

    pid: int


@dataclass(frozen=True)
class Ready:
    """The supervisor, whose process id this is, can start ranks."""

    pid: int


@dataclass(frozen=True)
class Stale:
    """The zygote does not fit and ends; its successor should import these modules too."""

    preload: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """The request could not be carried out."""

    reason: str


@dataclass(frozen=True)
class RankStarted:
    """A rank runs."""

    pid: int


@dataclass(frozen=True)
class RankEnded:
    """A rank has ended."""

    pid: int
    returncode: int


class PeerCredentials(NamedTuple):
    """The process at the other end of a local socket."""

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
    """Return the next message from a zygote or supervisor; None if the peer has gone.

    Raises
    ------
    TimeoutError
        If the connection's timeout has passed.
    """
    try:
        data = connection.recv(MAX_MESSAGE_BYTES)
    except TimeoutError:
        raise
    except OSError:
        return None
    return pickle.loads(data) if data else None


def await_message(connection: socket.socket, limit: StartLimit) -> object:
    """Return the next message as `receive`, if it comes within the limit.

    Raises
    ------
    TimeoutError
        If the limit's deadline has passed.
    """
    for seconds in limit.intervals():
        connection.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            message = receive(connection)
            connection.settimeout(None)
            return message
    raise TimeoutError


def read_environment(descriptor: int) -> dict[str, str]:
    """Read the environment that came with a `StartRank`."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        variables: dict[str, str] = pickle.load(file)
    return variables
