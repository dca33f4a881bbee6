"""Drivers in separate interpreters, each with a deadline and without leftover processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.driver import ERROR, FACTS
from benchmarks.floors import target
from benchmarks.packages import library

ROOT = Path(__file__).resolve().parent.parent
END_SECONDS = 10.0
SLOW_PYTHON = {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
"""Variables of the caller with which no one would compare launchers."""
TAIL = 4000
"""Characters of a failed driver's errors that are shown; its peer's own are among them."""
DRIVER = (sys.executable, "-m", "benchmarks.driver")

_kept: set[int] = set()


class Failed(Exception):
    """A driver failed, died, or took too long."""


class Printed(NamedTuple):
    """Output that was read at one time."""

    at: float
    data: bytes


class Driven(NamedTuple):
    """The facts that a driver returned, and its output."""

    facts: dict[str, Any]
    printed: list[Printed]


def apart(function: Callable[..., dict[str, Any]], seconds: float, /, **parameters: Any) -> Driven:
    """Call a function in a fresh interpreter, the driver.

    Parameters
    ----------
    function : callable
        A function whose return value can be encoded as JSON.
    seconds : float
        Deadline in seconds.
    **parameters
        Arguments of the function, encoded as JSON.

    Raises
    ------
    Failed
        If it raised, died or took too long.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as stderr:
        file = Path(folder, "facts.json")
        driver = subprocess.Popen(
            [*DRIVER, target(function), json.dumps(parameters), str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            # What peers leave in the temporary directories goes with this one.
            env=environment() | {"TMPDIR": folder, "SPARK_LOCAL_DIRS": folder},
        )
        with _reading(driver) as printed:
            try:
                driver.wait(seconds)
            except subprocess.TimeoutExpired:
                raise Failed(f"not done after {seconds:g} s") from None
            finally:
                end_descendants()
        stderr.seek(0)
        return Driven(_facts_in(file, stderr.read()), printed)


def environment() -> dict[str, str]:
    """Return the environment of a driver: this project on its path, this interpreter for Spark.

    Variables that change how fast Python starts and prints are left out.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    usual = {name: value for name, value in os.environ.items() if name not in SLOW_PYTHON}
    return {"PYSPARK_PYTHON": sys.executable, **usual, "PYTHONPATH": path}


def adopt_orphans() -> None:
    """Become the parent of processes that a driver leaves behind, to be able to end them."""
    from distributor.core.processes import set_subreaper  # other launchers' drivers do without

    set_subreaper()


@contextlib.contextmanager
def kept(pids: Sequence[int]) -> Iterator[None]:
    """Let these processes and their descendants outlive the drivers."""
    _kept.update(pids)
    try:
        yield
    finally:
        _kept.difference_update(pids)


def end_descendants() -> None:
    """Kill all descendants of this process, except those that are kept."""
    psutil = library("psutil")
    doomed = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process().children():
            if child.pid not in _kept:
                doomed += [*child.children(recursive=True), child]
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=END_SECONDS)


@contextlib.contextmanager
def _reading(process: subprocess.Popen[bytes]) -> Iterator[list[Printed]]:
    """Read the output of a process, which a full pipe would block."""
    stdout = process.stdout
    assert stdout is not None
    chunks: list[Printed] = []

    def read() -> None:
        while chunk := os.read(stdout.fileno(), 1 << 20):
            chunks.append(Printed(time.time(), chunk))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield chunks
    finally:
        reader.join()
        stdout.close()


def _facts_in(file: Path, stderr: bytes) -> dict[str, Any]:
    if not file.exists():
        raise Failed(f"the driver died: {_last_line(stderr)}")
    outcome = json.loads(file.read_text())
    if ERROR in outcome:
        sys.stderr.write(stderr.decode(errors="replace")[-TAIL:])
        raise Failed(" ".join(outcome[ERROR].split())[:300])
    facts: dict[str, Any] = outcome[FACTS]
    return facts


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"
