"""One local copy of a remote folder for all processes of a node that load it at once.

Each holds a lock of the kernel's on it, which ends with the process however that ends: alone while
it makes the copy, together with the others while it uses it. Who can have it alone when it leaves
is the last, and removes the copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distributor.core.atomic_files import atomic_path
from distributor.node.environment.build_once import open_lock, tree_size, try_lock_exclusively
from distributor.node.environment.cache import CacheEntry

Fill = Callable[[Path], object]
"""Copies into a folder."""


@contextlib.contextmanager
def borrowed(name: str, fill: Fill) -> Iterator[Path]:
    """Have a copy for a while, together with all of this user's processes that want the same.

    Parameters
    ----------
    name : str
        Tells what is copied from anything else; part of a file's name.
    fill : callable
        Makes the copy. What it raises is raised here, and each of the others tries for itself.
    """
    place = _place()
    if place is None:
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            fill(Path(folder))
            yield Path(folder)
        return
    _sweep(place)
    while True:
        with _Copy(place, name) as copy:
            if copy.join(fill):
                yield copy.folder
                return


def _place() -> Path | None:
    """Give the folder of this user's copies; None where there can be none, or no locks."""
    folder = Path(tempfile.gettempdir(), f"distributor-checkpoints-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return folder if os.fstat(found).st_uid == os.getuid() else None
        finally:
            os.close(found)
    except OSError:
        return None


def _sweep(place: Path) -> None:
    """Remove the copies that nobody uses any more: of processes that were killed."""
    for lock in place.glob("*.lock"):
        with _Copy(place, lock.stem):
            pass  # whoever leaves is perhaps the last


def copies() -> list[CacheEntry]:
    """List the copies on this machine that nobody removes: their processes were killed."""
    place = _place()
    if place is None:
        return []
    found = [_Left.of(place, lock) for lock in sorted(place.glob("*.lock"))]
    return [each for each in found if not each.in_use()]


@dataclass(frozen=True)
class _Left:
    """A copy, as `distributor.cleaning` knows what is left."""

    path: Path
    used_at: float
    size: int

    @classmethod
    def of(cls, place: Path, lock: Path) -> _Left:
        return cls(place / lock.stem, lock.stat().st_mtime, tree_size(place / lock.stem))

    def in_use(self) -> bool:
        with open_lock(self.path.with_name(f"{self.path.name}.lock")) as lock:
            return not try_lock_exclusively(lock)

    def remove(self) -> bool:
        with _Copy(self.path.parent, self.path.name):
            pass  # whoever leaves is perhaps the last
        return not self.path.exists()


class _Copy:
    """A copy's folder and lock; the last who leaves removes both.

    Parameters
    ----------
    place : Path
        The folder they are in.
    name : str
        The folder's name, which it has only while it is whole.
    """

    def __init__(self, place: Path, name: str) -> None:
        self.folder = place / name
        self._half = place / f"{name}.half"
        self._file = place / f"{name}.lock"
        self._lock = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # others use it
        else:
            if self._current():
                self._remove()
        finally:
            os.close(self._lock)

    def join(self, fill: Fill) -> bool:
        """Share it once it is whole; False where it was removed before this one had the lock."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # waits for whoever makes it
        while self._current() and not self.folder.exists():
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self._current() and not self.folder.exists():
                self._make(fill)
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # not at once: others may come in between
        return self._current()

    def _current(self) -> bool:
        """Tell whether the lock is the one that others find."""
        try:
            return os.path.samestat(os.fstat(self._lock), self._file.stat())
        except FileNotFoundError:
            return False

    def _make(self, fill: Fill) -> None:
        with atomic_path(self.folder, self._half) as partial:
            fill(partial)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(self._half)  # at once: whoever is killed leaves no half of it
        shutil.rmtree(self._half, ignore_errors=True)
        self._file.unlink(missing_ok=True)
