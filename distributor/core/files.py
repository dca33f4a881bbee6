"""Files and folders that appear complete or not at all, or that other users cannot touch.

Among the latter are the scratch folders of ranks, which are removed even if the rank is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from distributor._compat.cpython import set_multiprocessing_folder

_FILE = re.compile(r"file:(?://(?:localhost)?)?(/(?!/).*)", re.IGNORECASE | re.DOTALL)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):(/*)(.*)", re.IGNORECASE | re.DOTALL)
# Schemes after which not even a slash is needed to see that no folder of this name is meant.
_KNOWN = {"abfs", "abfss", "dbfs", "file", "gs", "hdfs", "s3", "s3a", "s3n", "viewfs", "wasbs"}


def absolute(path: str | os.PathLike[str], name: str = "The path") -> str:
    """Return a path of this machine as an absolute one; an address with a scheme unchanged."""
    text = os.fspath(path)
    is_address = "://" in text and not text.lower().startswith(("file:", "dbfs:"))
    return text if is_address else local_path(text, name)


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path for messages: without the credentials that an address may contain."""
    return re.sub("://[^/@\\s]*@", "://", os.fspath(path))


def local_path(path: str | os.PathLike[str], name: str = "The path") -> str:
    """Return the absolute path of a file or folder of this machine."""
    text = os.fspath(path)
    if found := _FILE.fullmatch(text):
        return unquote(found[1], errors="surrogateescape")
    if (found := _SCHEME.fullmatch(text)) and (found[2] or found[1].lower() in _KNOWN):
        raise ValueError(
            f"{name} is {text!r}, which is no path of this machine. "
            f"{_instead(found[1].lower(), found[2], found[3])}"
        )
    if not os.path.lexists(text):
        _check_shell(text, name)
    return str(Path(os.path.expanduser(text)).absolute())


def _instead(scheme: str, slashes: str, rest: str) -> str:
    """Return what to write for an address that is incomplete, or of no storage that is known."""
    if scheme == "dbfs":
        if rest.startswith("Volumes/"):
            return f"Write '/{rest}'."
        return (
            f"Write '/dbfs/{rest}', the mount of DBFS, or the path of a volume: "
            "'/Volumes/<catalog>/<schema>/<volume>'."
        )
    if scheme == "file":
        return f"Write 'file:///{rest}', or the path alone."
    if len(slashes) > 1:
        return "Write a path, such as that of a mounted folder."
    if scheme in ("hdfs", "viewfs", "webhdfs"):
        return f"Write '{scheme}://HOST:PORT/{rest}', or '{scheme}:///{rest}' for the default host."
    scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
    note = " as a str, because a Path has no double slash" if slashes else ""
    return f"Write '{scheme}://{rest}'{note}."


def _check_shell(text: str, name: str) -> None:
    """Check that a path has nothing that only a shell replaces or removes."""
    if text != text.strip():
        raise ValueError(
            f"{name} is {text!r}, which begins or ends with a blank. Write {text.strip()!r}."
        )
    if text.startswith("$") or os.path.expandvars(text) != text:
        raise ValueError(
            f"{name} is {text!r}, but only a shell replaces variables. Write "
            f"{os.path.expandvars(text)!r}, or pass os.path.expandvars({text!r})."
        )
    if text.startswith("~") and os.path.expanduser(text) == text:
        user = text[1:].partition("/")[0]
        raise ValueError(f"{name} is {text!r}, but there is no user {user!r} on this machine.")


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
    found = path.lstat()  # a link may lead to a folder of another user
    others_may_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or others_may_write:
        raise PermissionError(f"'{path}' is not a folder that only this user can write to")
    return path


def for_this_user(path: str, flags: int) -> int:
    """Open a file that only this user can read, if it is created: an ``opener`` for `open`."""
    return os.open(path, flags, 0o600)


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock on a file; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_exclusively(descriptor: int, seconds: float, late: str) -> None:
    """Wait for an exclusive lock on a file, which is released when the process ends, however.

    After so many seconds, raise TimeoutError with the text `late`.
    """
    deadline = time.monotonic() + seconds
    pause, longest = LOCK_POLL_SECONDS
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise TimeoutError(late)
        time.sleep(pause)
        pause = min(pause * 1.5, longest)


ELSEWHERE = "elsewhere"  # a link in the scratch folder to a second folder


def new_scratch_path() -> str:
    """Return a new path, as short as multiprocessing's own: socket paths have a length limit."""
    return os.path.join(tempfile.gettempdir(), f"pymp-{secrets.token_hex(4)}")


def create_scratch(folder: str) -> None:
    """Create the folder, and have this process and its children put their sockets there."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        raise  # another user has created it, who could read the path on a command line
    except OSError:
        return  # multiprocessing then makes its own when it needs one, and reports if it cannot
    set_multiprocessing_folder(folder)


def create_elsewhere(scratch: str, parent: str) -> str:
    """Create a folder elsewhere that is removed together with a scratch folder, at most one."""
    folder = os.path.join(parent, os.path.basename(scratch))
    os.symlink(folder, os.path.join(scratch, ELSEWHERE))
    os.makedirs(parent, exist_ok=True)
    os.mkdir(folder, 0o700)
    return folder


def remove_scratch(folder: str) -> None:
    """Remove the folder, and the one elsewhere; another process may do so at the same time."""
    with contextlib.suppress(OSError):
        elsewhere = os.readlink(os.path.join(folder, ELSEWHERE))
        # The rank's program can write here too, and must not choose what is removed.
        if os.path.basename(elsewhere) == os.path.basename(folder):
            shutil.rmtree(elsewhere, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
