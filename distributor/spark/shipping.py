"""Sends to the executors, once per session: this package, files, archives and large programs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import os
import shutil
import tempfile
import threading
import weakref
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from distributor import source
from distributor._compat import pyspark as private
from distributor.core.resources import format_bytes
from distributor.errors import DistributorError
from distributor.screen.messages import notify, shows_notices, warn_if_source_changed
from distributor.serialization import oob_pickle
from distributor.serialization.pickle_diagnostics import heaviest
from distributor.serialization.pickling import PickledCall
from distributor.serialization.program import Call, Program
from distributor.spark.session import Session
from distributor.spark.shipped_files import ProgramFile

WAIT_SECONDS = 600.0
"""Seconds to wait for another run of this session that sends the same file."""


@dataclass
class _File:
    """A file of a session: whether it was sent, and the lock of the run that sends it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sent: bool = False


@dataclass
class _Sent:
    """What a session has sent, or sends: files by name, and which of them are large programs.

    Of those, `kept` has the names by digest, those that were used last at the end.
    """

    files: defaultdict[str, _File] = field(default_factory=lambda: defaultdict(_File))
    kept: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


_lock = threading.Lock()
_SENT: weakref.WeakKeyDictionary[Any, _Sent] = weakref.WeakKeyDictionary()


def send_file(session: Session, name: str, write: Callable[[Path], object]) -> None:
    """Send a file to every executor, unless this session has sent one of this name."""

    def send(folder: Path) -> None:
        path = folder / name
        write(path)
        if session.is_connect:
            session.spark.addArtifacts(str(path), file=True)
        else:
            session.spark.sparkContext.addFile(str(path))

    _send_once(session, name, send)


def send_archive(session: Session, name: str, archive: Path) -> None:
    """Send an archive to every executor, which unpacks it, unless this session has sent it."""

    def send(folder: Path) -> None:
        size = format_bytes(archive.stat().st_size)
        notify(f"Spark sends {archive.name} ({size}) to the executors, once per session.")
        # Under a unique name: Spark refuses two files of one name from different folders.
        suffix = ".tar.gz" if archive.name.endswith(".tar.gz") else archive.suffix
        link = folder / f"{name}{suffix}"
        link.unlink(missing_ok=True)  # an attempt that failed may have left it
        link.symlink_to(archive)
        if session.is_connect:
            session.spark.addArtifacts(f"{link}#{name}", archive=True)
        else:
            session.spark.sparkContext.addArchive(f"{link}#{name}")

    _send_once(session, name, send)


def _send_once(session: Session, name: str, send: Callable[[Path], object]) -> None:
    """Call `send` with a folder from which Spark can send a file, unless the file was sent."""
    with _lock:
        file = _SENT.setdefault(session.spark, _Sent()).files[name]
    # If several runs begin at the same time, one sends the file and the others wait.
    if not file.lock.acquire(timeout=WAIT_SECONDS):
        raise TimeoutError(
            f"Another run of this session has been sending the file {name} to the executors for "
            f"more than {WAIT_SECONDS:g} s. Start this run once it has been sent, or make a new "
            "Spark session if it hangs."
        )
    try:
        if file.sent:
            return
        with (
            tempfile.TemporaryDirectory()
            if session.is_connect
            # Spark serves files from their place, and removes this folder when it stops.
            else nullcontext(private.temporary_folder(session.spark.sparkContext))
        ) as folder:
            send(Path(folder))
        file.sent = True
    finally:
        file.lock.release()


# This package


def portable_task(
    session: Session, function: str, argument: bytes
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function that Spark runs in each task, and send the source that it needs."""
    digest, importing, content = _own_source()
    archive = f"{source.ARCHIVE}{hashlib.sha256(content).hexdigest()[:16]}.zip"
    send_file(session, archive, lambda path: path.write_bytes(content))

    # No name of this module may be used inside: being local is what makes it travel by value.
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pkgutil
        import sys
        import types

        from pyspark import SparkFiles

        module: Any = sys.modules.get("distributor.source")
        if getattr(getattr(module, "checked", None), "digest", None) != digest:
            module = types.ModuleType("distributor.source")
            exec(compile(importing, "distributor/source.py", "exec"), vars(module))
        replaced = module.import_drivers_source(digest, lambda: SparkFiles.get(archive))
        yield from pkgutil.resolve_name(function)(argument, batches, replaced)

    return task


class _Own(NamedTuple):
    """The source of this package that the driver runs, and what executors need to import it."""

    digest: str
    importing: bytes
    archive: bytes


@functools.cache
def _own_source() -> _Own:
    """Pack this package with the packages that it needs, in the driver's versions.

    This is done once in a process: if the files change later, the process still runs what it has
    imported.
    """
    warn_if_source_changed()
    ours = source.files_of(source.own_spec())
    files = {f"distributor/{name}": content for name, content in ours.items()}
    for name, content in source.files_of(find_spec("cloudpickle")).items():
        files[f"cloudpickle/{name}"] = content
    # A requirement. It is not imported: that sets a variable of the user's process.
    found: Any = find_spec("threadpoolctl")
    files["threadpoolctl.py"] = found.loader.get_data(found.origin)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            # With a fixed date, the same code is the same archive.
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return _Own(source.digest_of(ours), ours["source.py"], buffer.getvalue())


# Large programs

LARGE_PROGRAM = 512 * 1024
"""Bytes above which a program is sent as a file, once, and not with the task, each time.

PySpark writes a task of a megabyte or more to disk, and with it the ranks' variables.
"""
PREFIX = "distributor-program-"
KEPT = 4
"""How many large programs a session keeps that no run uses: those that were used last."""

_numbers = itertools.count()
_used: weakref.WeakSet[ProgramFile] = weakref.WeakSet()
"""The files of runs: what describes one to the tasks of a run lives as long as the run."""


def send_program(session: Session, program: Program) -> Program | ProgramFile:
    """Return what a task needs to have the program.

    A large one is sent by Spark, once while it is kept: tasks that are submitted after this have
    its file.
    """
    if program.size <= LARGE_PROGRAM:
        return program
    if isinstance(program, Call) and shows_notices():
        where = ""
        with contextlib.suppress(Exception):  # only ranks can load some arguments, such as shards
            heavy, weight = heaviest(*program.call.load())
            where = f", {format_bytes(weight)} of it in {heavy}"
        size = format_bytes(program.size)
        notify(
            f"'{program.name}' takes {size} to the ranks{where}. It is sent to each executor once."
        )
    further = program.further if isinstance(program, Call) else None
    if isinstance(program, Call) and further and further.size <= LARGE_PROGRAM:
        program = replace(program, further=None)  # the same file for all runs of its function
    else:
        further = None
    # Before it is pickled: a call keeps its digest.
    digests = [part.digest for part in program.parts] if isinstance(program, Call) else []
    pickled = io.BytesIO()
    pickler = oob_pickle.Pickler(pickled)
    pickler.dump(program)
    payload = pickled.getbuffer()

    def write(path: Path) -> None:
        # Large arrays and tensors are not copied.
        pieces = [payload, *oob_pickle.pieces(payload.nbytes, pickler.buffers)]
        size = sum(memoryview(piece).nbytes for piece in pieces)
        if (free := shutil.disk_usage(path.parent).free) < size:
            raise DistributorError(
                f"'{program.name}' takes {format_bytes(size)} to the ranks, and the driver has "
                f"{format_bytes(free)} free in {path.parent}, from which Spark sends it to the "
                "executors. Free space there, set another folder (spark.local.dir), or let the "
                "ranks load the data themselves."
            )
        with path.open("wb") as file:
            file.writelines(pieces)

    content = hashlib.sha256(b"".join([payload, *digests]))
    sent = _program_file(session, content.hexdigest(), further)
    send_file(session, sent.name, write)
    return sent


def _program_file(session: Session, digest: str, further: PickledCall | None) -> ProgramFile:
    """Return the file of a program, and empty those that are no longer kept."""
    with _lock:
        programs = _SENT.setdefault(session.spark, _Sent())
        # A program that was dropped is sent again under another name.
        name = programs.kept.pop(digest, None) or f"{PREFIX}{digest[:16]}-{next(_numbers)}"
        programs.kept[digest] = name
        used = {file.name for file in _used}
        for old in [each for each in programs.kept if programs.kept[each] not in used][:-KEPT]:
            programs.dropped.append(programs.kept.pop(old))
            _empty(session, programs.dropped[-1])
        sent = ProgramFile(name, tuple(programs.dropped), further)
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
