"""Builds a folder once per node: by one process, under a lock, completely or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from distributor.core.host import host_name
from distributor.core.private_files import is_private_folder, private_folder
from distributor.core.resources import IN_YARN
from distributor.errors import ExecutorNotReady, StartTimeout

CACHE_VARIABLE = "DISTRIBUTOR_CACHE"
"""The variable that names the cache folder."""
COMPLETE_MARKER = ".complete"
"""The file that is written last into a folder; it contains the folder's size on disk in bytes."""
LOCK_POLL_SECONDS = 0.1
"""Seconds between two attempts to get a lock; a blocking wait would have no deadline."""

Build = Callable[[Path, int], object]
"""Fills a folder; also gets the lock's descriptor, for processes that write into the folder."""


def with_default_cache(variables: Mapping[str, str], folder: str | None) -> dict[str, str]:
    """Add a default cache folder to environment variables.

    Parameters
    ----------
    variables : mapping of str to str
        Environment variables; a DISTRIBUTOR_CACHE that is not empty takes precedence.
    folder : str, optional
        The administrator's choice.
    """
    return {**variables, CACHE_VARIABLE: variables.get(CACHE_VARIABLE) or folder or ""}


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Return this user's cache folder on this node, and create it if necessary.

    Parameters
    ----------
    variables : mapping of str to str
        Environment variables: DISTRIBUTOR_CACHE names the folder, or XDG_CACHE_HOME its parent.

    Raises
    ------
    ExecutorNotReady
        If no candidate can be written.
    """
    refused = []
    for folder in _candidates(variables):
        try:
            if folder == _shared_folder():
                return private_folder(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
            refused.append(f"{folder} cannot be written")
        except OSError as error:
            refused.append(f"{folder} cannot be used ({error.strerror or error})")
    raise ExecutorNotReady(
        f"On {host_name()} there is no folder for environments: "
        f"{', '.join(refused)}. Name a writable folder in the "
        f"variable {CACHE_VARIABLE} (env=), or as spark.distributor.cacheDir in Spark's conf."
    )


def cache_folders(variables: Mapping[str, str]) -> list[Path]:
    """List the existing folders that `cache_folder` may have returned."""
    shared = _shared_folder()
    return [
        folder
        for folder in _candidates(variables)
        if (is_private_folder(folder) if folder == shared else folder.is_dir())
    ]


def _candidates(variables: Mapping[str, str]) -> Iterator[Path]:
    if chosen := variables.get(CACHE_VARIABLE):
        yield Path(chosen).expanduser().absolute()
        return
    with contextlib.suppress(RuntimeError, KeyError):  # an executor's user may have no home
        yield Path(variables.get("XDG_CACHE_HOME") or _home(variables) / ".cache", "distributor")
    yield _shared_folder()


def _home(variables: Mapping[str, str]) -> Path:
    """Return this user's home. In its containers, YARN sets HOME to one folder for all users."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir) if IN_YARN in variables else Path.home()


def _shared_folder() -> Path:
    """Return this user's folder in the temporary one; others may have created it."""
    return Path(tempfile.gettempdir(), f"distributor-{os.getuid()}")


@contextlib.contextmanager
def build_once(folder: Path, build: Build, deadline: float) -> Iterator[Path]:
    """Use a folder, which is built first if it does not exist yet.

    Within the context, this process holds a shared lock on the folder, so that
    `distributor.node.environment.cache`, which removes unused folders, does not remove it.

    Parameters
    ----------
    folder : Path
        The folder; its name identifies its content.
    build : callable
        Builds it. If it fails, or this process dies, the next caller starts over.
    deadline : float
        When, by ``time.monotonic``, another process must have finished building it.

    Raises
    ------
    StartTimeout
        If the deadline has passed.
    """
    file = lock_file_of(folder)
    while True:
        with open_lock(file) as lock:
            exclusive = _lock_unless_built(folder, lock, deadline)
            if exclusive and is_current_lock(lock, file) and not _is_complete(folder):
                _build(folder, build, lock)
            fcntl.flock(lock, fcntl.LOCK_SH)
            # Before we got the shared lock, a cleaner may have removed both folder and lock.
            if is_current_lock(lock, file) and _is_complete(folder):
                os.utime(lock)  # records when the folder was last used
                yield folder
                return


def _build(folder: Path, build: Build, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    build(folder, lock)
    (folder / COMPLETE_MARKER).write_text(str(tree_size(folder)))


def _is_complete(folder: Path) -> bool:
    return (folder / COMPLETE_MARKER).exists()


def lock_file_of(folder: Path) -> Path:
    """Return the file on which users of a folder hold a lock."""
    return folder.with_name(f"{folder.name}.lock")


@contextlib.contextmanager
def open_lock(file: Path) -> Iterator[int]:
    """Open a lock file; a process that inherits the descriptor shares what is locked by it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_current_lock(lock: int, file: Path) -> bool:
    """Return whether an open lock is the one that others open: the file may have been removed."""
    try:
        return os.path.samestat(os.fstat(lock), file.stat())
    except FileNotFoundError:
        return False


def _lock_unless_built(folder: Path, lock: int, deadline: float) -> bool:
    """Wait for an exclusive lock; return False if another process builds the folder first."""
    while not _is_complete(folder):
        if try_lock_exclusively(lock):
            return True
        if time.monotonic() > deadline:
            raise StartTimeout(
                f"start_timeout has passed, and another process on {host_name()} is still building "
                f"{folder}."
            )
        time.sleep(LOCK_POLL_SECONDS)
    return False


def try_lock_exclusively(descriptor: int) -> bool:
    """Take an exclusive lock; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def tree_size(folder: Path) -> int:
    """Return the bytes of disk that a folder and its content use."""
    paths = [folder]
    for above, folders, files in os.walk(folder):
        paths += [Path(above, name) for name in (*folders, *files)]
    return sum(map(disk_size, paths))


def disk_size(path: Path) -> int:
    """Return the bytes of disk that a file or an empty folder uses; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0
