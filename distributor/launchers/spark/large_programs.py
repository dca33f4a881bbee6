"""Sends programs that are too large for a task: over the runs' own connections, or by Spark."""

from __future__ import annotations

import contextlib
import io
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distributor.core.resources import format_bytes
from distributor.errors import DistributorError
from distributor.launchers.spark.task.program_file import PREFIX
from distributor.launchers.spark.task.task_spec import ProgramFile
from distributor.screen.messages import notify
from distributor.serialization import oob_pickle
from distributor.serialization.pickle_diagnostics import heaviest
from distributor.serialization.program import Call, Program
from distributor.spark.executor_files import send_file
from distributor.spark.session import Session
from distributor.wire.hub import Hub
from distributor.wire.transfer import BlockServer, MemoryBlock, block_secret, digest

LARGE_PROGRAM = 512 * 1024
"""Bytes above which a program is sent as a file, once, and not with the task, each time.

PySpark writes a task of a megabyte or more to disk, and with it the ranks' variables.
"""
ENCRYPTION = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
)
"""Properties with which Spark encrypts what it sends, which the runs' own connections do not."""

_unlinked: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions some of whose executors cannot reach this process."""


@contextlib.contextmanager
def program_for_nodes(
    session: Session, program: Program, hub: Hub, bind_address: str
) -> Iterator[Program | ProgramFile]:
    """Return what a task needs to have the program; a large one is sent as long as this is open."""
    if program.size <= LARGE_PROGRAM:
        yield program
        return
    _describe(program)
    content = _Content.of(program)
    if uses_spark(session) or _is_encrypted(session):
        _send_through_spark(session, program, content)
        yield content.file
        return
    secret, block = block_secret(hub.secret), MemoryBlock(content.pieces)
    with BlockServer(bind_address, secret, block, port=hub.port):
        yield content.file


def use_spark(session: Session) -> None:
    """Have Spark send the large programs of this session's runs from now on."""
    _unlinked.add(session.spark)


def uses_spark(session: Session) -> bool:
    """Return whether `use_spark` was called for this session."""
    return session.spark in _unlinked


class _Content(NamedTuple):
    """The content of a program's file, and how nodes name it."""

    file: ProgramFile
    pieces: list[Any]

    @classmethod
    def of(cls, program: Program) -> _Content:
        pickled = io.BytesIO()
        pickler = oob_pickle.Pickler(pickled)
        pickler.dump(program)
        end = pickled.getbuffer().nbytes
        pieces = [pickled.getbuffer(), *oob_pickle.pieces(end, pickler.buffers)]
        size = sum(memoryview(piece).nbytes for piece in pieces)
        return cls(ProgramFile(PREFIX + digest(MemoryBlock(pieces), size), size), pieces)


def _describe(program: Program) -> None:
    """Show which variable makes a program large."""
    if isinstance(program, Call):
        path, weight = heaviest(*program.call.load())
        notify(
            f"'{program.name}' takes {format_bytes(program.size)} to the ranks, "
            f"{format_bytes(weight)} of it in {path}. It is sent to each executor once."
        )


def _is_encrypted(session: Session) -> bool:
    return any((session.conf(key) or "false").lower() == "true" for key in ENCRYPTION)


def _send_through_spark(session: Session, program: Program, content: _Content) -> None:
    def write(path: Path) -> None:
        _check_room(program.name, path.parent, content.file.size)
        with path.open("wb") as file:
            for piece in content.pieces:
                file.write(piece)

    send_file(session, content.file.name, write)


def _check_room(name: str, folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DistributorError(
            f"'{name}' takes {format_bytes(size)} to the ranks, and the driver has "
            f"{format_bytes(free)} free in {folder}, from which Spark sends it to the executors. "
            "Free space there, set another folder (spark.local.dir), or let the ranks load the "
            "data themselves."
        )
