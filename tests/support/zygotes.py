"""Runs whose ranks are forked from a zygote, for the tests of zygotes.

The test process is the driver of most runs, so that the tests of a file can share a zygote; tests
in which the driver's own life matters start a driver process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from distributor import TorchDistributor
from distributor.launchers.local import cool_down
from support import waiting
from support.packages import HIDING_TORCH
from support.waiting import alive, until

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(waiting)

DEADLINE = 60.0
"""Seconds after which a rank or module that waits to be released gives up."""


@pytest.fixture(scope="module")
def modules_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create a folder of modules for ranks; the tests of a file have one, and so share a zygote."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "not_there_yet"))
        patch.syspath_prepend(str(folder))
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # so that output is buffered
        yield folder
        cool_down()


@pytest.fixture(scope="module")
def without_torch() -> Iterator[None]:
    """Hide torch from the ranks of a file, whose zygotes so start faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HIDING_TORCH)
        yield


WriteModule = Callable[[str], str]


@pytest.fixture
def write_module(modules_folder: Path, tmp_path: Path) -> Iterator[WriteModule]:
    """Return a function that writes a module of this test and returns the module's name.

    No zygote exists before the test, and none that has loaded such a module remains after it.
    """

    def write(source: str) -> str:
        name = f"module_of_{tmp_path.name}"
        path = modules_folder / f"{name}.py"
        # The size differs each time, so that a change is noticed even if the clock is coarse.
        path.write_text(f"{source}\n" + "#" * (path.stat().st_size if path.exists() else 0))
        return name

    kill_zygotes()
    yield write
    kill_zygotes()


def kill_zygotes() -> None:
    """Kill the zygotes of this process, and wait until they have ended."""
    pids = zygotes()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pids), "a zygote is left")


def local(num_processes: int = 1, *, warm: bool = True, **settings: Any) -> TorchDistributor:
    settings = {"timeout": 120, **settings}
    return TorchDistributor(num_processes, local_mode=True, use_gpu=False, warm=warm, **settings)


def grandparent() -> int:
    """Return, in a rank, the process id of its supervisor's parent."""
    return psutil.Process(os.getppid()).ppid()


def zygote_of(num_processes: int = 1, **settings: Any) -> int:
    """Run on some ranks, and return the process id of their zygote, a child of this process."""
    (zygote,) = set(local(num_processes, **settings).run_all(grandparent))
    assert psutil.Process(zygote).ppid() == os.getpid()
    return zygote


def zygotes() -> list[int]:
    """Return the process ids of the zygotes of this process."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if "zygote" in child.cmdline():
                found.append(child.pid)
    return alive(found)


@dataclass
class HeldRun:
    """A run whose ranks wait until they are released."""

    zygote: int
    supervisor: int
    family: list[int]
    """The process ids of the ranks, and of a process that each has forked."""
    values: Future[list[str]]
    folder: Path

    def release(self) -> list[str]:
        (self.folder / "go").touch()
        return self.values.result(DEADLINE)


def hold(folder: Path) -> str:
    """Report, in a rank, which processes belong to it, and wait to be released."""
    child = os.fork()
    if child == 0:
        signal.pause()
    note = folder / os.environ["RANK"]
    pids = grandparent(), os.getppid(), os.getpid(), child
    note.with_suffix(".part").write_text(json.dumps(pids))
    note.with_suffix(".part").rename(note.with_suffix(".json"))
    until((folder / "go").exists, "this rank is released", DEADLINE)
    return "undisturbed"


@contextlib.contextmanager
def held_run(folder: Path, num_processes: int = 1, **settings: Any) -> Iterator[HeldRun]:
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(local(num_processes, **settings).run_all, hold, folder)
        try:
            until(
                lambda: values.done() or len(list(folder.glob("*.json"))) == num_processes,
                "the ranks run",
                DEADLINE,
            )
            reports = [json.loads(note.read_text()) for note in folder.glob("*.json")]
            ((zygote, supervisor),) = {(zygote, supervisor) for zygote, supervisor, *_ in reports}
            family = [pid for _, _, *own in reports for pid in own]
            yield HeldRun(zygote, supervisor, family, values, folder)
        finally:
            (folder / "go").touch()
