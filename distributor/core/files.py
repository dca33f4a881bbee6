"""Files and folders that appear complete or not at all, or that other users cannot touch."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_POLL_SECONDS = 0.001, 0.05  # at first, and at most: most locks are held for milliseconds


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, replacing it if it exists; other processes never see a part of it."""
    with atomic_path(path) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def atomic_path(
    path: str | os.PathLike[str], partial: str | os.PathLike[str] | None = None
) -> Iterator[Path]:
    """Yield a path to write a file or folder at, which is renamed to `path` unless that raises.

    A folder that another process has made there meanwhile stays. A caller that is alone passes a
    fixed `partial`: what a process that was killed has left there is removed first.
    """
    path = Path(path)
    if partial is None:
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    partial = Path(partial)
    _remove(partial)
    try:
        yield partial
        try:
            partial.replace(path)
        except OSError:
            if not (partial.is_dir() and path.is_dir()):
                raise
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def removed_if_empty(path: str | os.PathLike[str]) -> Iterator[None]:
    """Remove a folder, and those above it, if it did not exist before, and is empty at the end."""
    folder = Path(path)
    parents = (folder, *folder.parents)
    missing = list(itertools.takewhile(lambda each: not os.path.exists(each), parents))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it has content, and so have those above
            for each in missing:
                each.rmdir()


def private_folder(path: Path) -> Path:
    """Create a folder for this user alone, or use one that this user has created."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not is_private_folder(path):
        raise PermissionError(f"'{path}' is not a folder that only this user can write to")
    return path


def is_private_folder(path: Path) -> bool:
    """Return whether a path is a folder of this user, no link, that no others may write to."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others_may_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not others_may_write


def for_this_user(path: str, flags: int) -> int:
    """Open a file that only this user can read, if it is created: an ``opener`` for `open`."""
    return os.open(path, flags, 0o600)


def lock_exclusively(descriptor: int, seconds: float, late: str) -> None:
    """Wait for an exclusive lock on a file, which is released when the process ends, however.

    After so many seconds, raise TimeoutError with the text `late`.
    """
    deadline = time.monotonic() + seconds
    pause, longest = LOCK_POLL_SECONDS
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise TimeoutError(late)
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
