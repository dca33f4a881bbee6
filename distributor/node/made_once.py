"""What a node makes once and keeps: one process makes it, under a lock, and whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from distributor.errors import ExecutorNotReady, StartTimeout

CACHE = "DISTRIBUTOR_CACHE"
"""The variable that names the folder in which such things are kept."""
MARK = ".complete"
"""The file that is written last."""
LOOK_SECONDS = 0.1
"""Seconds between two tries for a lock; to wait for one would have no deadline."""

Make = Callable[[Path, int], object]
"""Fills a folder; also gets the lock's descriptor, for processes that write into it."""


def with_cache(variables: Mapping[str, str], folder: str | None) -> dict[str, str]:
    """Add a folder of the administrator's to environment variables that name none.

    Parameters
    ----------
    variables : mapping of str to str
        Environment variables.
    folder : str, optional
        What DISTRIBUTOR_CACHE then is.
    """
    return {**variables, CACHE: variables.get(CACHE) or folder or ""}


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Give the folder in which this user's things are kept on this node.

    Parameters
    ----------
    variables : mapping of str to str
        Environment variables: DISTRIBUTOR_CACHE names it, or XDG_CACHE_HOME the one above it.

    Raises
    ------
    ExecutorNotReady
        Where there is none that can be written.
    """
    tried = list(_candidates(variables))
    for folder in tried:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    raise ExecutorNotReady(
        f"On {socket.gethostname()} environments cannot be kept: {', '.join(map(str, tried))} "
        f"cannot be written. Name a folder that can, in the variable {CACHE} (env=), or as "
        "spark.distributor.cacheDir in Spark's conf."
    )


def _candidates(variables: Mapping[str, str]) -> Iterator[Path]:
    if chosen := variables.get(CACHE):
        yield Path(chosen).absolute()
        return
    with contextlib.suppress(RuntimeError):  # an executor's user may have no home
        yield Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache", "distributor")
    shared = Path(tempfile.gettempdir(), f"distributor-{os.getuid()}")
    if not shared.exists() or shared.lstat().st_uid == os.getuid():
        yield shared


def made_once(folder: Path, make: Make, deadline: float) -> Path:
    """Give a folder that is made where it is not there yet.

    Parameters
    ----------
    folder : Path
        Its place; the name tells its content from any other.
    make : callable
        Makes it. Where it, or this process, ends before it is done, the next one begins anew.
    deadline : float
        When, by ``time.monotonic``, another process must have made it.

    Raises
    ------
    StartTimeout
        Where the deadline passed.
    """
    if (folder / MARK).exists():
        return folder
    with _locked(folder.with_name(f"{folder.name}.lock"), deadline) as lock:
        if not (folder / MARK).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder, lock)
            (folder / MARK).touch()
    return folder


@contextlib.contextmanager
def _locked(file: Path, deadline: float) -> Iterator[int]:
    """Hold a lock; whoever has inherited its descriptor holds it too."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _taken(descriptor):
            if time.monotonic() > deadline:
                raise StartTimeout(
                    f"After start_timeout, another process on {socket.gethostname()} still makes "
                    f"{file.with_suffix('')}."
                )
            time.sleep(LOOK_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
