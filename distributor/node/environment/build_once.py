"""Builds something once per node: by one process, under a lock, complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from distributor.core.host import host_name
from distributor.errors import ExecutorNotReady, StartTimeout

CACHE_VARIABLE = "DISTRIBUTOR_CACHE"
"""The variable that names the folder in which such things are kept."""
MARK = ".complete"
"""The file that is written last; it holds the bytes of disk that the folder takes."""
LOOK_SECONDS = 0.1
"""Seconds between two tries for a lock; to wait for one would have no deadline."""

Make = Callable[[Path, int], object]
"""Fills a folder; also gets the lock's descriptor, for processes that write into it."""


def with_default_cache(variables: Mapping[str, str], folder: str | None) -> dict[str, str]:
    """Add a folder of the administrator's to environment variables that name none.

    Parameters
    ----------
    variables : mapping of str to str
        Environment variables.
    folder : str, optional
        What DISTRIBUTOR_CACHE then is.
    """
    return {**variables, CACHE_VARIABLE: variables.get(CACHE_VARIABLE) or folder or ""}


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
        f"On {host_name()} environments cannot be kept: {', '.join(map(str, tried))} "
        f"cannot be written. Name a folder that can, in the variable {CACHE_VARIABLE} (env=), or "
        "as spark.distributor.cacheDir in Spark's conf."
    )


def cache_folders(variables: Mapping[str, str]) -> list[Path]:
    """List the folders that `cache_folder` may have chosen and that exist."""
    return [folder for folder in _candidates(variables) if folder.is_dir()]


def _candidates(variables: Mapping[str, str]) -> Iterator[Path]:
    if chosen := variables.get(CACHE_VARIABLE):
        yield Path(chosen).absolute()
        return
    with contextlib.suppress(RuntimeError):  # an executor's user may have no home
        yield Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache", "distributor")
    shared = Path(tempfile.gettempdir(), f"distributor-{os.getuid()}")
    if not shared.exists() or shared.lstat().st_uid == os.getuid():
        yield shared


@contextlib.contextmanager
def build_once(folder: Path, make: Make, deadline: float) -> Iterator[Path]:
    """Use a folder, which is made first if it is not there yet.

    As long as the context lasts, this process holds a lock on the folder, so that nobody removes
    it; `distributor.node.environment.cache` does that to folders that nobody uses.

    Parameters
    ----------
    folder : Path
        Its place; the name tells its content from any other.
    make : callable
        Makes it. If it, or this process, ends before it is done, the next one begins anew.
    deadline : float
        When, by ``time.monotonic``, another process must have made it.

    Raises
    ------
    StartTimeout
        If the deadline passed.
    """
    file = lock_of(folder)
    while True:
        with open_lock(file) as lock:
            alone = _await_turn(folder, lock, deadline)
            if alone and is_current_lock(lock, file) and not _is_made(folder):
                _make(folder, make, lock)
            fcntl.flock(lock, fcntl.LOCK_SH)
            # Whoever had the lock alone in between may have removed folder and lock.
            if is_current_lock(lock, file) and _is_made(folder):
                os.utime(lock)  # its time says when the folder was last used
                yield folder
                return


def _make(folder: Path, make: Make, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    make(folder, lock)
    (folder / MARK).write_text(str(tree_size(folder)))


def _is_made(folder: Path) -> bool:
    return (folder / MARK).exists()


def lock_of(folder: Path) -> Path:
    """Return the file on which users of a folder hold a lock."""
    return folder.with_name(f"{folder.name}.lock")


@contextlib.contextmanager
def open_lock(file: Path) -> Iterator[int]:
    """Open a lock; whoever has inherited its descriptor holds what is locked by it too."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_current_lock(lock: int, file: Path) -> bool:
    """Tell whether an open lock is the one that others find: it may have been removed."""
    try:
        return os.path.samestat(os.fstat(lock), file.stat())
    except FileNotFoundError:
        return False


def _await_turn(folder: Path, lock: int, deadline: float) -> bool:
    """Wait until this process has the lock alone; return False if others made the folder first."""
    while not _is_made(folder):
        if try_lock_exclusively(lock):
            return True
        if time.monotonic() > deadline:
            raise StartTimeout(
                f"After start_timeout, another process on {host_name()} still makes {folder}."
            )
        time.sleep(LOOK_SECONDS)
    return False


def try_lock_exclusively(descriptor: int) -> bool:
    """Take a lock alone, unless others hold it; tell whether that worked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def tree_size(folder: Path) -> int:
    """Count the bytes of disk that a folder takes."""
    paths = [folder]
    for above, folders, files in os.walk(folder):
        paths += [Path(above, name) for name in (*folders, *files)]
    return sum(map(disk_size, paths))


def disk_size(path: Path) -> int:
    """Count the bytes of disk that a file or an empty folder takes."""
    with contextlib.suppress(OSError):  # removed meanwhile
        return path.lstat().st_blocks * 512
    return 0
