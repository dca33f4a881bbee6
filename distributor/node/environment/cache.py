"""Bounds what this package caches on a node: the least recently used is removed first.

Whoever uses a folder of the cache holds a lock of the kernel's on it, so that none in use is
removed, whichever process looks. A folder is renamed before it is removed: a cleaner that is
killed leaves nothing that could be taken for a whole one, and the next one removes the rest.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distributor.core.host import host_name
from distributor.errors import ExecutorNotReady
from distributor.node.environment.build_once import (
    MARK,
    disk_size,
    is_current_lock,
    lock_of,
    open_lock,
    tree_size,
    try_lock_exclusively,
)

CACHE_GB, CACHE_DAYS = "DISTRIBUTOR_CACHE_GB", "DISTRIBUTOR_CACHE_DAYS"
"""The variables that set the bound."""
DEFAULT_BOUNDS = {CACHE_GB: 20.0, CACHE_DAYS: 30.0}
GB, DAY = 1e9, 86400.0
_CACHED = re.compile(r"((?:environment|requirements|modules)-[0-9a-f]{16})(?:\.lock)?")
_REMOVED = re.compile(r"(?:environment|requirements|modules)-[0-9a-f]{16}\.[0-9a-f]{8}\.removed")
_VALUE = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}-value-of-rank-\d+")


@dataclass(frozen=True)
class CacheLimits:
    """What may be kept.

    Parameters
    ----------
    days : float
        Days without use after which something is removed.
    size : float
        Bytes that all together may take.
    """

    days: float
    size: float = math.inf

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> CacheLimits:
        """Read the bounds from environment variables.

        Raises
        ------
        ExecutorNotReady
            If one of them is not a number.
        """
        return cls(_number(CACHE_DAYS, variables), _number(CACHE_GB, variables) * GB)


class CacheEntry(Protocol):
    """Something that is kept on this node and may be removed if nobody uses it."""

    @property
    def path(self) -> Path: ...

    @property
    def used_at(self) -> float:
        """When it was last used, in seconds since the epoch."""

    @property
    def size(self) -> int:
        """The bytes of disk that it takes."""

    def in_use(self) -> bool: ...

    def remove(self) -> bool:
        """Remove it; return False if it is in use."""


def select_excess(leftovers: Iterable[CacheEntry], bounds: CacheLimits) -> Iterator[CacheEntry]:
    """Select what is to be removed so that the rest is within the bounds."""
    oldest, kept = time.time() - bounds.days * DAY, 0
    for each in sorted(leftovers, key=lambda each: each.used_at, reverse=True):
        kept += each.size
        if each.used_at <= oldest or kept > bounds.size:
            yield each


def trim(cache: Path, bounds: CacheLimits) -> None:
    """Bring a cache within its bounds, as far as its folders are not in use."""
    for each in list(select_excess(cached_environments(cache), bounds)):
        each.remove()
    remove_leftovers(cache)


def cached_environments(cache: Path) -> list[CacheEntry]:
    """List the environments in a cache; other files that lie there are not ours."""
    with contextlib.suppress(FileNotFoundError):
        found = (_CACHED.fullmatch(name) for name in os.listdir(cache))
        return [_Cached.of(cache / name) for name in sorted({each[1] for each in found if each})]
    return []


def remove_leftovers(cache: Path) -> None:
    """Remove what cleaners that were killed had begun to remove."""
    with contextlib.suppress(FileNotFoundError):
        for name in filter(_REMOVED.fullmatch, os.listdir(cache)):
            shutil.rmtree(cache / name, ignore_errors=True)


def saved_values() -> list[CacheEntry]:
    """List values that were kept for `distributor.load_value`, less those in a ``log_dir``."""
    folder = Path(tempfile.gettempdir())
    found = (folder / name for name in os.listdir(folder) if _VALUE.fullmatch(name))
    return [_Value.of(path) for path in found if path.lstat().st_uid == os.getuid()]


def _number(name: str, variables: Mapping[str, str]) -> float:
    text = variables.get(name, "")
    try:
        number = float(text) if text else DEFAULT_BOUNDS[name]
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise ExecutorNotReady(
            f"On {host_name()} the variable {name} is {text!r}; it is a number such as "
            f"{DEFAULT_BOUNDS[name]:.0f}, the default."
        )
    return number


@dataclass(frozen=True)
class _Cached:
    path: Path
    used_at: float
    size: int

    @classmethod
    def of(cls, folder: Path) -> _Cached:
        lock = lock_of(folder)
        used_at = next((each.stat().st_mtime for each in (lock, folder) if each.exists()), 0.0)
        return cls(folder, used_at, _size(folder))

    def in_use(self) -> bool:
        if not lock_of(self.path).exists():
            return False
        with open_lock(lock_of(self.path)) as lock:
            return not try_lock_exclusively(lock)

    def remove(self) -> bool:
        file = lock_of(self.path)
        aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.removed")
        had_lock = file.exists()
        with open_lock(file) as lock:
            if not try_lock_exclusively(lock) or not is_current_lock(lock, file):
                return False
            if had_lock and os.fstat(lock).st_mtime > self.used_at:
                return False  # used since it was listed
            with contextlib.suppress(FileNotFoundError):
                self.path.rename(aside)
            file.unlink()
        shutil.rmtree(aside, ignore_errors=True)
        return True


def _size(folder: Path) -> int:
    """Return the size that was noted when the folder was made; count it if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / MARK).read_text())
    return tree_size(folder)


@dataclass(frozen=True)
class _Value:
    path: Path
    used_at: float
    size: int

    @classmethod
    def of(cls, path: Path) -> _Value:
        return cls(path, path.lstat().st_mtime, disk_size(path))

    def in_use(self) -> bool:
        return False

    def remove(self) -> bool:
        self.path.unlink(missing_ok=True)  # who has loaded it has mapped it, and keeps that
        return True
