"""``distributor clean``: removes what this package has left on this machine.

Cached files are removed once they are unused. Results and MLflow's files are a user's work: they
are listed, and removed only if the user says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distributor.core.checkpoint_config import DEFAULT_STORAGE_PATH
from distributor.core.resources import format_bytes
from distributor.node.environment.cache import (
    CacheEntry,
    CacheLimits,
    cache_folders,
    cached_environments,
    remove_leftovers,
    saved_values,
    select_excess,
    tree_size,
)
from distributor.train.storage.manifest import MANIFEST, RUN_LOG
from distributor.train.storage.shared_download import leftover_copies

MLFLOW_FILES = ("mlflow.db", "mlruns", "mlartifacts")
"""What MLflow makes in the working directory: its database, and the files of runs."""
OUR_TAG = "distributor.run_id"
"""The tag of MLflow runs that this package has created or logged to."""


def clean(days: float | None = None, *, dry_run: bool = False) -> Iterator[str]:
    """Remove files that are unused for so long, or without `days` by the limits of the cache.

    Yield a line for each of these environments, saved values and copies of checkpoints.
    """
    limits = _limits(days)
    caches = cache_folders(os.environ)
    freed = 0
    for each in _unused(limits):
        if each.in_use() if dry_run else not each.remove():
            yield f"kept, because it is in use: {each.path}"
        else:
            freed += each.size
            yield f"{'would remove' if dry_run else 'removed'} {describe(each)}"
    if not dry_run:
        for cache in caches:
            remove_leftovers(cache)
    where = f" (cache: {', '.join(map(str, caches))})" if caches else ""
    yield f"{'Would free' if dry_run else 'Freed'} {format_bytes(freed)}{where}"


def describe(entry: CacheEntry) -> str:
    """Return the path of an entry, its size and its last use."""
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
    return f"{entry.path} ({format_bytes(entry.size)}, last used {used})"


def _limits(days: float | None) -> CacheLimits:
    return CacheLimits.of(os.environ) if days is None else CacheLimits(days)


def _unused(limits: CacheLimits) -> Iterator[CacheEntry]:
    for cache in cache_folders(os.environ):
        yield from select_excess(cached_environments(cache), limits)
    yield from select_excess(saved_values(), CacheLimits(limits.days))
    yield from leftover_copies()  # left only by processes that were killed


@dataclass(frozen=True)
class Work:
    """Files that are a user's work, of one kind.

    Parameters
    ----------
    title : str
        What they are, with their folder.
    option : str
        The option that removes them.
    entries : list of CacheEntry
        The files and folders.
    """

    title: str
    option: str
    entries: list[CacheEntry]

    @property
    def size(self) -> int:
        """Their bytes of disk."""
        return sum(each.size for each in self.entries)

    def remove(self) -> None:
        """Remove them, and the folder of all results if nothing is left in it."""
        for each in self.entries:
            each.remove()
        with contextlib.suppress(OSError):
            _results_folder().rmdir()


class _Files(CacheEntry):
    def remove(self) -> bool:
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)
        return True


def users_work(days: float | None = None) -> list[Work]:
    """List the results and MLflow's files that nobody has changed for so long, if there are any."""
    limits = CacheLimits(_limits(days).days)
    folder = _results_folder()
    found = [
        Work(f"Results in {folder}", "results", list(select_excess(_results(folder), limits))),
        Work(
            f"MLflow's files in {Path.cwd()}, with all of its runs",
            "mlflow",
            list(select_excess(_mlflow_files(Path.cwd()), limits)),
        ),
    ]
    return [work for work in found if work.entries]


def _results_folder() -> Path:
    return Path(DEFAULT_STORAGE_PATH).expanduser()


def _results(folder: Path) -> Iterator[CacheEntry]:
    """List the folders of runs; empty ones were left by runs that stored nothing."""
    with contextlib.suppress(FileNotFoundError):
        for each in sorted(folder.iterdir()):
            is_run = (each / RUN_LOG).exists() or any(each.glob(f"*/{MANIFEST}"))
            if each.is_dir() and (is_run or not any(each.iterdir())):
                yield _Files(each, _changed_at(each), tree_size(each))


def _mlflow_files(folder: Path) -> Iterator[CacheEntry]:
    """List MLflow's files in a folder if there is a run of this package; they belong together."""
    paths = [path for name in MLFLOW_FILES if (path := folder / name).exists()]
    if _has_our_run(folder):
        changed_at = max(map(_changed_at, paths))
        yield from (_Files(path, changed_at, tree_size(path)) for path in paths)


def _has_our_run(folder: Path) -> bool:
    return any(folder.glob(f"mlruns/*/*/tags/{OUR_TAG}")) or _has_our_tag(folder / "mlflow.db")


def _has_our_tag(database: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as db:
            query = "select 1 from tags where key = ? limit 1"
            return db.execute(query, (OUR_TAG,)).fetchone() is not None
    except sqlite3.Error:  # there is none, or it is not MLflow's
        return False


def _changed_at(path: Path) -> float:
    """Return when a file, or anything in a folder, was last changed."""
    times = [0.0]
    for each in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):  # it is gone
            times.append(each.lstat().st_mtime)
    return max(times)
