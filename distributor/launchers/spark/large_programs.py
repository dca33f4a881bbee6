"""Sends programs that are too large for a task to the executors, as files of Spark's."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import shutil
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributor._compat import pyspark as private
from distributor.core.resources import format_bytes
from distributor.errors import DistributorError
from distributor.launchers.spark.task.task_spec import ProgramFile
from distributor.screen.messages import notify
from distributor.serialization import oob_pickle
from distributor.serialization.pickle_diagnostics import heaviest
from distributor.serialization.program import Call, Program
from distributor.spark.package_shipping import send_file
from distributor.spark.session import Session

LARGE_PROGRAM = 512 * 1024
"""Bytes above which a program is sent as a file, once, and not with the task, each time.

PySpark writes a task of a megabyte or more to disk, and with it the ranks' variables.
"""
PREFIX = "distributor-program-"
KEPT = 4
"""How many large programs a session keeps that no run uses: those that were used last."""


@dataclass
class _Files:
    """The names of a session's files: those that are kept, by digest, and those that are not.

    Those that were used last come last.
    """

    kept: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


_lock = threading.Lock()
_numbers = itertools.count()
_FILES: weakref.WeakKeyDictionary[Any, _Files] = weakref.WeakKeyDictionary()
_used: weakref.WeakSet[ProgramFile] = weakref.WeakSet()
"""The files of runs: what describes one to the tasks of a run lives as long as the run."""


def send_program(session: Session, program: Program) -> Program | ProgramFile:
    """Return what a task needs to have the program.

    A large one is sent by Spark, once while it is kept: tasks that are submitted after this have
    its file.
    """
    if program.size <= LARGE_PROGRAM:
        return program
    _describe(program)
    pieces = _pieces(program)

    def write(path: Path) -> None:
        _check_room(program.name, path.parent, sum(memoryview(piece).nbytes for piece in pieces))
        with path.open("wb") as file:
            file.writelines(pieces)

    sent = _file(session, pieces)
    send_file(session, sent.name, write)
    return sent


def _pieces(program: Program) -> list[Any]:
    """Return the content of a program's file; large arrays and tensors are not copied."""
    pickled = io.BytesIO()
    pickler = oob_pickle.Pickler(pickled)
    pickler.dump(program)
    payload = pickled.getbuffer()
    return [payload, *oob_pickle.pieces(payload.nbytes, pickler.buffers)]


def _file(session: Session, pieces: list[Any]) -> ProgramFile:
    """Return the file of some content, and empty those that are no longer kept."""
    content = hashlib.sha256()
    for piece in pieces:
        content.update(piece)
    digest = content.hexdigest()
    with _lock:
        files = _FILES.setdefault(session.spark, _Files())
        # A program that was dropped is sent again under another name.
        name = files.kept.pop(digest, None) or f"{PREFIX}{digest[:16]}-{next(_numbers)}"
        files.kept[digest] = name
        used = {file.name for file in _used}
        for old in [each for each in files.kept if files.kept[each] not in used][:-KEPT]:
            files.dropped.append(files.kept.pop(old))
            _empty(session, files.dropped[-1])
        sent = ProgramFile(name, tuple(files.dropped))
        _used.add(sent)
    return sent


def _empty(session: Session, name: str) -> None:
    """Empty a file on the driver, which Spark never removes, and sends to each new executor."""
    from pyspark import SparkFiles

    if not session.is_connect:
        sent_from = private.temporary_folder(session.spark.sparkContext)
        for folder in (sent_from, SparkFiles.getRootDirectory()):
            with contextlib.suppress(OSError):
                os.truncate(os.path.join(folder, name), 0)


def _describe(program: Program) -> None:
    """Show which variable makes a program large."""
    if isinstance(program, Call):
        path, weight = heaviest(*program.call.load())
        notify(
            f"'{program.name}' takes {format_bytes(program.size)} to the ranks, "
            f"{format_bytes(weight)} of it in {path}. It is sent to each executor once."
        )


def _check_room(name: str, folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DistributorError(
            f"'{name}' takes {format_bytes(size)} to the ranks, and the driver has "
            f"{format_bytes(free)} free in {folder}, from which Spark sends it to the executors. "
            "Free space there, set another folder (spark.local.dir), or let the ranks load the "
            "data themselves."
        )
