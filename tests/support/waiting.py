"""Waiting for conditions with a deadline, and for processes to end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

Some = TypeVar("Some", int, psutil.Process)
MARK = "DISTRIBUTOR_TEST_MARK"
"""An environment variable that marks all processes that a test has started."""
SOON = 10.0
"""Seconds within which all processes of a run that was cut short must have ended."""
DEADLINE = 300
"""Seconds for whole programs, Spark's start included, on a slow machine with other tests."""
TICK = 0.02


def comes_true(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until a condition holds; return False if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(TICK)
    return True


def until(condition: Callable[[], object], what: str, seconds: float = SOON) -> None:
    """Wait until a condition holds, or fail."""
    assert comes_true(condition, seconds), f"{what}: waited {seconds:g} s in vain"


def runs(process: int | psutil.Process) -> bool:
    """Return True if a process still runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running()) and found.status() != psutil.STATUS_ZOMBIE
    return False


def alive(processes: Iterable[Some]) -> list[Some]:
    """Return the processes that still run."""
    return [process for process in processes if runs(process)]


def assert_gone(processes: Iterable[Some], seconds: float = SOON) -> None:
    """Wait until all of these processes have ended, or fail."""
    processes = list(processes)
    assert processes
    until(lambda: not alive(processes), f"still alive are some of {processes}", seconds)


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Return the processes that have a mark in their environment, descendants included."""

    def has_mark(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return process.environ().get(variable) == mark and runs(process)
        return False

    return [process for process in psutil.process_iter() if has_mark(process)]
