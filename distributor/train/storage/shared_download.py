"""One local copy of a remote folder for all processes of a node that load it at once."""

# Each process holds a shared file lock (``flock``) on the copy, which the kernel releases when the
# process ends. A process that gets the exclusive lock when it is done is the last user, and removes
# the copy. While a process makes the copy it also holds an exclusive lock on a second file: to wait
# for the exclusive lock on the first would be to wait until all users of a finished copy have left.

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from distributor.core.files import atomic_path, private_folder
from distributor.node.environment.cache import is_current_lock, open_lock, try_lock_exclusively

Download = Callable[[Path], object]
"""Copies the remote folder into a folder of this machine, which it makes."""


@contextlib.contextmanager
def shared_download(name: str, download: Download) -> Iterator[Path]:
    """Provide a copy of a remote folder, until the last process of this user has left the context.

    `name` identifies what is copied. If `download` fails, each of the other processes tries itself.
    """
    root = _root_folder()
    if root is None:
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            download(Path(folder))
            yield Path(folder)
        return
    _remove_unused(root)
    while True:
        with _LocalCopy(root, name) as copy:
            if copy.acquire(download):
                yield copy.folder
                return


def _root_folder() -> Path | None:
    """Return the folder of this user's copies; None if it or locks in it cannot be had."""
    folder = Path(tempfile.gettempdir(), f"distributor-checkpoints-{os.getuid()}")
    try:
        descriptor = os.open(private_folder(folder), os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return folder
        finally:
            os.close(descriptor)
    except OSError:
        return None


def _remove_unused(root: Path) -> None:
    """Remove the copies whose processes have all been killed."""
    for lock in root.glob("*.lock"):
        with _LocalCopy(root, lock.stem):
            pass  # its exit removes a copy that nobody uses


class _LocalCopy:
    """A copy's folder and lock files; the last process to leave the context removes them.

    The folder has its name only while it is complete.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / name
        self._partial = root / f"{name}.partial"
        self._lock_file = root / f"{name}.lock"
        self._download_lock_file = root / f"{name}.download-lock"
        self._lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> _LocalCopy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if try_lock_exclusively(self._lock) and is_current_lock(self._lock, self._lock_file):
                self._remove()
        finally:
            os.close(self._lock)

    def acquire(self, download: Download) -> bool:
        """Wait for the copy or make it, and hold a shared lock on it.

        Returns False if another process has removed the copy before this one got the lock.
        """
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # waits for a process that removes it
        if not is_current_lock(self._lock, self._lock_file):
            return False
        if not self.folder.exists():
            with open_lock(self._download_lock_file) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that makes it
                if not self.folder.exists():
                    with atomic_path(self.folder, self._partial) as partial:
                        download(partial)
        return True

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._partial)  # a killed process leaves no incomplete folder
        shutil.rmtree(self._partial, ignore_errors=True)
        self._download_lock_file.unlink(missing_ok=True)
        self._lock_file.unlink(missing_ok=True)
