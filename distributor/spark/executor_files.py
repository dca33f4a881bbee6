"""Sends files to all executors through Spark, once per session."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributor._compat import pyspark as private
from distributor.core.resources import format_bytes
from distributor.screen.messages import notify
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
