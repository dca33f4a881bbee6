"""Limits what this package caches on a node: the least recently used entries are removed first.

Each process that uses a folder of the cache holds a lock on it, so that no folder in use is
removed. A folder is renamed before it is removed: if the cleaner is killed, nothing is left that
could be mistaken for a complete folder, and the next cleaner removes the rest.
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
    COMPLETE_MARKER,
    disk_size,
    is_current_lock,
    lock_file_of,
    open_lock,
    tree_size,
    try_lock_exclusively,
)

CACHE_GB, CACHE_DAYS = "DISTRIBUTOR_CACHE_GB", "DISTRIBUTOR_CACHE_DAYS"
"""The variables that set the limits."""
DEFAULT_LIMITS = {CACHE_GB: 20.0, CACHE_DAYS: 30.0}
GB_BYTES, DAY_SECONDS = 1e9, 86400.0
_ENTRY = re.compile(r"((?:environment|requirements|modules)-[0-9a-f]{16})(?:\.lock)?")
_REMOVED = re.compile(r"(?:environment|requirements|modules)-[0-9a-f]{16}\.[0-9a-f]{8}\.removed")
_VALUE = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}-value-of-rank-\d+")


@dataclass(frozen=True)
class CacheLimits:
    """What may stay in a cache.

    Parameters
    ----------
    days : float
        Days without use after which an entry is removed.
    size : float
        Bytes of disk that all entries together may use; unlimited by default.
    """

    days: float
    size: float = math.inf

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> CacheLimits:
        """Read the limits from environment variables.

        Raises
        ------
        ExecutorNotReady
            If a variable is not a number, or is negative.
        """
        return cls(_number(CACHE_DAYS, variables), _number(CACHE_GB, variables) * GB_BYTES)


class CacheEntry(Protocol):
    """Something that is stored on this node and may be removed while it is not in use."""

    @property
    def path(self) -> Path: ...

    @property
    def used_at(self) -> float:
        """When it was last used, in seconds since the epoch."""

    @property
    def size(self) -> int:
        """The bytes of disk that it uses."""

    def in_use(self) -> bool: ...

    def remove(self) -> bool:
        """Remove it; return False if it is in use."""


def select_excess(entries: Iterable[CacheEntry], limits: CacheLimits) -> Iterator[CacheEntry]:
    """Select the entries to remove so that the others are within the limits."""
    oldest, total = time.time() - limits.days * DAY_SECONDS, 0
    for entry in sorted(entries, key=lambda entry: entry.used_at, reverse=True):
        total += entry.size
        if entry.used_at <= oldest or total > limits.size:
            yield entry


def trim(cache: Path, limits: CacheLimits) -> None:
    """Remove entries of a cache that exceed the limits and are not in use."""
    for entry in list(select_excess(cached_environments(cache), limits)):
        entry.remove()
    remove_leftovers(cache)


def cached_environments(cache: Path) -> list[CacheEntry]:
    """List the environments in a cache folder; other files there do not belong to this package."""
    with contextlib.suppress(FileNotFoundError):
        found = (_ENTRY.fullmatch(name) for name in os.listdir(cache))
        return [_Environment.of(cache / name) for name in sorted({m[1] for m in found if m})]
    return []


def remove_leftovers(cache: Path) -> None:
    """Remove what killed cleaners had begun to remove."""
    with contextlib.suppress(FileNotFoundError):
        for name in filter(_REMOVED.fullmatch, os.listdir(cache)):
            shutil.rmtree(cache / name, ignore_errors=True)


def saved_values() -> list[CacheEntry]:
    """List the values saved for `distributor.load_value`, except for those in a ``log_dir``."""
    folder = Path(tempfile.gettempdir())
    found = (folder / name for name in os.listdir(folder) if _VALUE.fullmatch(name))
    return [_Value.of(path) for path in found if path.lstat().st_uid == os.getuid()]


def _number(name: str, variables: Mapping[str, str]) -> float:
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


@dataclass(frozen=True)
class _Environment:
    path: Path
    used_at: float
    size: int

    @classmethod
    def of(cls, folder: Path) -> _Environment:
        times = (path.stat().st_mtime for path in (lock_file_of(folder), folder) if path.exists())
        return cls(folder, next(times, 0.0), _recorded_size(folder))

    def in_use(self) -> bool:
        if not lock_file_of(self.path).exists():
            return False
        with open_lock(lock_file_of(self.path)) as lock:
            return not try_lock_exclusively(lock)

    def remove(self) -> bool:
        file = lock_file_of(self.path)
        aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.removed")
        had_lock = file.exists()
        with open_lock(file) as lock:
            if not try_lock_exclusively(lock) or not is_current_lock(lock, file):
                return False
            if had_lock and os.fstat(lock).st_mtime > self.used_at:
                return False  # it was used since it was listed
            with contextlib.suppress(FileNotFoundError):
                self.path.rename(aside)
            file.unlink()
        shutil.rmtree(aside, ignore_errors=True)
        return True


def _recorded_size(folder: Path) -> int:
    """Return the size that was recorded when the folder was built, or else compute it."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / COMPLETE_MARKER).read_text())
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
        self.path.unlink(missing_ok=True)  # a process that has mapped it keeps the data
        return True
