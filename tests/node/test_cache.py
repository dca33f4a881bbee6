"""The cache has limits; nothing in use is removed, and nothing remains partly removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import SOON, until

from distributor.node.cache import (
    CACHE_DAYS,
    CACHE_GB,
    DAY_SECONDS,
    GB_BYTES,
    build_once,
    cached_environments,
    trim,
)

MEGABYTE = 2**20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("DISTRIBUTOR_CACHE", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def place(cache: Path, number: int) -> Path:
    return cache / f"requirements-{number:016x}"


@contextlib.contextmanager
def used(cache: Path, number: int) -> Iterator[Path]:
    """Use an environment of a megabyte."""

    def make(folder: Path, lock: int) -> None:
        (folder / "content").write_bytes(bytes(MEGABYTE))

    with build_once(place(cache, number), make, time.monotonic() + SOON) as folder:
        yield folder


def create(cache: Path, number: int, days_ago: float) -> Path:
    """Create an environment that was last used some days ago."""
    with used(cache, number) as folder:
        pass
    at = time.time() - days_ago * DAY_SECONDS
    os.utime(f"{folder}.lock", (at, at))
    return folder


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_an_environment_not_used_for_long_is_removed(cache: Path) -> None:
    create(cache, 1, days_ago=31)
    kept = create(cache, 2, days_ago=29)
    other = cache / "of the user"
    other.mkdir()
    trim(cache, {})
    assert names(cache) == [other.name, kept.name, f"{kept.name}.lock"]


def test_the_least_recently_used_goes_first(cache: Path) -> None:
    for number, days in enumerate((3, 1, 4, 2)):
        create(cache, number, days_ago=days)
    with used(cache, 2):
        pass  # so that it is the most recently used
    trim(cache, {CACHE_GB: str(2.5 * MEGABYTE / GB_BYTES)})
    assert [each.path for each in cached_environments(cache)] == [place(cache, 1), place(cache, 2)]


def test_an_environment_in_use_is_never_removed(cache: Path) -> None:
    with used(cache, 1) as folder:
        trim(cache, {CACHE_DAYS: "0"})
        assert (folder / "content").exists()
    trim(cache, {CACHE_DAYS: "0"})
    assert names(cache) == []


CLEANING = """
import shutil, signal, sys
from pathlib import Path
from distributor.node.cache import trim

shutil.rmtree = lambda *args, **options: signal.pause()
trim(Path(sys.argv[1]), {"DISTRIBUTOR_CACHE_DAYS": "0"})
"""


def test_a_killed_cleaner_leaves_no_partly_removed_environment(cache: Path) -> None:
    folder = create(cache, 1, days_ago=1)
    with subprocess.Popen([sys.executable, "-c", CLEANING, str(cache)]) as cleaner:
        until(lambda: not folder.exists(), "it is being removed")
        cleaner.send_signal(signal.SIGKILL)
    # It may have been killed before it removed the lock file, too.
    (left,) = set(names(cache)) - {f"{folder.name}.lock"}
    assert left.endswith(".removed")
    with used(cache, 1):
        assert (folder / "content").stat().st_size == MEGABYTE
        trim(cache, {})
        assert names(cache) == [folder.name, f"{folder.name}.lock"]
