"""Sends files to all executors through Spark, once per session."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distributor._compat import pyspark as private
from distributor.core.resources import format_bytes
from distributor.screen.messages import notify
from distributor.spark.session import Session

_lock = threading.Lock()
_SENT: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""The names of the files that were sent, by session."""


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

    with _lock:  # if several runs begin at the same time, one sends the file and the others wait
        sent = _SENT.setdefault(session.spark, set())
        if name in sent:
            yield None
        elif session.is_connect:
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
        else:
            # Spark serves files from their place, and removes this folder when it stops.
            yield Path(private.temporary_folder(session.spark.sparkContext))
        sent.add(name)
