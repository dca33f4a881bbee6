"""The cache of a node: a folder is built once; those not used for long are removed first.

Each process that uses a folder holds a shared lock on the file beside it, so that no folder in use
is removed. A folder is renamed before it is removed: if the cleaner is killed, nothing is left that
could be mistaken for a complete folder, and the next cleaner removes the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pwd
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from distributor.core.addresses import host_name
from distributor.core.files import private_folder, try_lock
from distributor.core.resources import IN_YARN
from distributor.errors import ExecutorNotReady, StartTimeout

CACHE_VARIABLE = "DISTRIBUTOR_CACHE"
CACHE_GB, CACHE_DAYS = "DISTRIBUTOR_CACHE_GB", "DISTRIBUTOR_CACHE_DAYS"
# Gigabytes of disk for all entries, and days without use after which an entry is removed.
DEFAULT_LIMITS = {CACHE_GB: 20.0, CACHE_DAYS: 30.0}
GB_BYTES, DAY_SECONDS = 1e9, 86400.0
# Written last into a folder; contains the folder's size on disk in bytes.
COMPLETE_MARKER = ".complete"
LOCK_POLL_SECONDS = 0.1  # a blocking wait for a lock would have no deadline
_ENTRY = re.compile(r"((?:environment|requirements|modules)-[0-9a-f]{16})(?:\.lock)?")
_REMOVED = re.compile(r"(?:environment|requirements|modules)-[0-9a-f]{16}\.[0-9a-f]{8}\.removed")

# Fills a folder; also gets the lock's descriptor, for processes that write into the folder.
Build = Callable[[Path, int], object]


def with_default_cache(variables: Mapping[str, str], folder: str | None) -> dict[str, str]:
    """Add the administrator's choice of a cache folder, unless the variables already name one."""
    return {**variables, CACHE_VARIABLE: variables.get(CACHE_VARIABLE) or folder or ""}


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Return this user's cache folder on this node, and create it if necessary."""
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


def _candidates(variables: Mapping[str, str]) -> Iterator[Path]:
    if chosen := variables.get(CACHE_VARIABLE):
        yield Path(chosen).expanduser().absolute()
        return
    with contextlib.suppress(RuntimeError, KeyError):  # an executor's user may have no home
        yield Path(variables.get("XDG_CACHE_HOME") or _home(variables) / ".cache", "distributor")
    yield _shared_folder()


def _home(variables: Mapping[str, str]) -> Path:
    # In its containers, YARN sets HOME to one folder for all users.
    return Path(pwd.getpwuid(os.getuid()).pw_dir) if IN_YARN in variables else Path.home()


def _shared_folder() -> Path:
    """Return this user's folder in the temporary one; others may have created it."""
    return Path(tempfile.gettempdir(), f"distributor-{os.getuid()}")


@contextlib.contextmanager
def build_once(folder: Path, build: Build, deadline: float) -> Iterator[Path]:
    """Use a folder, which is built first, completely or not at all, if it does not exist yet."""
    file = lock_file_of(folder)
    while True:
        with open_lock(file) as lock:
            exclusive = _lock_unless_built(folder, lock, deadline)
            if exclusive and is_current_lock(lock, file) and not _is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                build(folder, lock)
                (folder / COMPLETE_MARKER).write_text(str(tree_size(folder)))
            fcntl.flock(lock, fcntl.LOCK_SH)
            # Before we got the shared lock, a cleaner may have removed both folder and lock.
            if is_current_lock(lock, file) and _is_complete(folder):
                os.utime(lock)  # records when the folder was last used
                yield folder
                return


def _lock_unless_built(folder: Path, lock: int, deadline: float) -> bool:
    """Wait for an exclusive lock; return False if another process builds the folder first."""
    while not _is_complete(folder):
        if try_lock(lock):
            return True
        if time.monotonic() > deadline:
            raise StartTimeout(
                f"start_timeout has passed, and another process on {host_name()} is still building "
                f"{folder}."
            )
        time.sleep(LOCK_POLL_SECONDS)
    return False


def _is_complete(folder: Path) -> bool:
    return (folder / COMPLETE_MARKER).exists()


def lock_file_of(folder: Path) -> Path:
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


def tree_size(folder: Path) -> int:
    """Return the bytes of disk that a folder and its content use."""
    paths, blocks = [folder], 0
    for above, folders, files in os.walk(folder):
        paths += [Path(above, name) for name in (*folders, *files)]
    for path in paths:
        with contextlib.suppress(OSError):  # it is gone
            blocks += path.lstat().st_blocks
    return blocks * 512


@dataclass(frozen=True)
class CacheEntry:
    """A folder that may be removed, with the time of its last use and its bytes of disk."""

    path: Path
    used_at: float
    size: int

    def remove(self) -> None:
        """Remove it, unless it is in use."""
        file = lock_file_of(self.path)
        aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.removed")
        had_lock = file.exists()
        with open_lock(file) as lock:
            if not try_lock(lock) or not is_current_lock(lock, file):
                return
            if had_lock and os.fstat(lock).st_mtime > self.used_at:
                return  # it was used since it was listed
            with contextlib.suppress(FileNotFoundError):
                self.path.rename(aside)
            file.unlink()
        shutil.rmtree(aside, ignore_errors=True)


def cached_environments(cache: Path) -> list[CacheEntry]:
    """List the environments in a cache folder; other files there do not belong to this package."""
    found = (_ENTRY.fullmatch(name) for name in os.listdir(cache))
    return [_environment(cache / name) for name in sorted({m[1] for m in found if m})]


def _environment(folder: Path) -> CacheEntry:
    times = (path.stat().st_mtime for path in (lock_file_of(folder), folder) if path.exists())
    try:
        size = int((folder / COMPLETE_MARKER).read_text())
    except (OSError, ValueError):  # it is not complete
        size = tree_size(folder)
    return CacheEntry(folder, next(times, 0.0), size)


def trim(cache: Path, variables: Mapping[str, str]) -> None:
    """Remove entries of a cache that exceed the limits and are not in use.

    Remove what killed cleaners had begun to remove, too.
    """
    oldest = time.time() - _limit(CACHE_DAYS, variables) * DAY_SECONDS
    most, total = _limit(CACHE_GB, variables) * GB_BYTES, 0
    entries = cached_environments(cache)
    for entry in sorted(entries, key=lambda entry: entry.used_at, reverse=True):
        total += entry.size
        if entry.used_at <= oldest or total > most:
            entry.remove()
    for name in filter(_REMOVED.fullmatch, os.listdir(cache)):
        shutil.rmtree(cache / name, ignore_errors=True)


def _limit(name: str, variables: Mapping[str, str]) -> float:
    text = variables.get(name, "")
    try:
        number = float(text) if text else DEFAULT_LIMITS[name]
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise ExecutorNotReady(
            f"On {host_name()} the variable {name} is {text!r}; it must be a number of at least 0, "
            f"such as {DEFAULT_LIMITS[name]:.0f}, the default."
        )
    return number
