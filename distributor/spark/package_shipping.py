"""Sends this package to the executors, once per session."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
import threading
import weakref
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.abc import ResourceLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from distributor import source
from distributor._compat import pyspark as private
from distributor.core.resources import format_bytes
from distributor.screen.messages import notify, warn_if_source_changed
from distributor.spark.session import Session

WAIT_SECONDS = 600.0
"""Seconds to wait for another run of this session that sends the same file."""


@dataclass
class _File:
    """A file of a session: whether it was sent, and the lock of the run that sends it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sent: bool = False


_lock = threading.Lock()
_FILES: weakref.WeakKeyDictionary[Any, defaultdict[str, _File]] = weakref.WeakKeyDictionary()
"""The files, by session and name."""


def send_file(session: Session, name: str, write: Callable[[Path], object]) -> None:
    """Send a file to every executor, unless this session has sent one of this name."""
    with _folder_for(session, name) as folder:
        if folder is None:
            return
        path = folder / name
        write(path)
        if session.is_connect:
            session.spark.addArtifacts(str(path), file=True)
        else:
            session.spark.sparkContext.addFile(str(path))


def send_archive(session: Session, name: str, archive: Path) -> None:
    """Send an archive to every executor, which unpacks it, unless this session has sent it."""
    with _folder_for(session, name) as folder:
        if folder is None:
            return
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


@contextlib.contextmanager
def _folder_for(session: Session, name: str) -> Iterator[Path | None]:
    """Return a folder from which Spark can send a file; None if the file was sent before."""
    import tempfile

    with _lock:
        file = _FILES.setdefault(session.spark, defaultdict(_File))[name]
    # If several runs begin at the same time, one sends the file and the others wait.
    if not file.lock.acquire(timeout=WAIT_SECONDS):
        raise TimeoutError(
            f"Another run of this session has been sending the file {name} to the executors for "
            f"more than {WAIT_SECONDS:g} s. Start this run once it has been sent, or make a new "
            "Spark session if it hangs."
        )
    try:
        if file.sent:
            yield None
        elif session.is_connect:
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
        else:
            # Spark serves files from their place, and removes this folder when it stops.
            yield Path(private.temporary_folder(session.spark.sparkContext))
        file.sent = True
    finally:
        file.lock.release()


def portable_task(
    session: Session, function: str, argument: bytes
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function that Spark runs in each task, and send the source that it needs."""
    own = _own_source()
    archive = f"{source.ARCHIVE}{hashlib.sha256(own.archive).hexdigest()[:16]}.zip"
    send_file(session, archive, lambda path: path.write_bytes(own.archive))
    return _bootstrap(function, argument, archive, own.digest, own.importing)


def task_frame(
    session: Session,
    rows: Any,
    function: str,
    spec: object,
    schema: str,
    profile: Any,
    *,
    barrier: bool,
) -> Any:
    """Plan a job whose tasks run a function of this package; nothing is submitted yet."""
    task = portable_task(session, function, pickle.dumps(spec, protocol=5))
    options = {} if profile is None else {"profile": profile}
    return session.map_in_arrow(rows, task, schema, barrier=barrier, **options)


def _bootstrap(
    function: str, argument: bytes, archive: str, digest: str, importing: bytes
) -> Callable[[Iterator[Any]], Iterator[Any]]:
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
    found = find_spec("threadpoolctl")  # not imported: that sets a variable of the user's process
    assert found is not None, "it is a requirement"
    assert isinstance(found.loader, ResourceLoader), "it is a file, or in an archive"
    assert found.origin is not None, "it is a file, or in an archive"
    files["threadpoolctl.py"] = found.loader.get_data(found.origin)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            # With a fixed date, the same code is the same archive.
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return _Own(source.digest_of(ours), ours["source.py"], buffer.getvalue())
