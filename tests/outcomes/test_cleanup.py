"""What ranks leave behind, and what a run leaves unchanged in the driver's process."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import logging
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import (
    RANK_DEADLINE,
    Distribute,
    failures_of,
    my_rank,
    wait_to_be_stopped,
    wait_until,
)
from support.waiting import runs, until

from distributor import (
    WorkerDied,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("failed", [False, True], ids=["success", "failure"])
def test_threads_finish_and_exit_handlers_run(
    distribute: Distribute, tmp_path: Path, failed: bool
) -> None:
    def program() -> None:
        note = tmp_path / f"rank{my_rank()}"

        def write(word: str) -> None:
            with note.open("a") as file:
                file.write(word + " ")

        def work() -> None:
            threading.main_thread().join(RANK_DEADLINE)  # as the interpreter begins to leave
            write("thread")

        atexit.register(write, "first")
        atexit.register(write, "last")
        threading.Thread(target=work).start()
        if failed and my_rank() == 0:
            raise LookupError("failed")
        if failed:
            sys.exit(3)

    if failed:
        with pytest.raises((LookupError, WorkerDied)) as caught:
            distribute(2).run(program)
        assert sorted(failures_of(caught.value)) == [0, 1]
    else:
        distribute(2).run(program)
    notes = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert notes == {"rank0": "thread last first ", "rank1": "thread last first "}


def test_failed_ranks_exit_handlers_run_to_their_end(
    distribute: Distribute, tmp_path: Path
) -> None:
    def program() -> None:
        pid, note = tmp_path / "pid", tmp_path / "note"
        if my_rank() == 1:
            pid.write_text(str(os.getpid()))
            wait_to_be_stopped()

        def work() -> None:
            other = int(pid.read_text())
            wait_until(lambda: not runs(other), "the other rank is stopped")
            note.write_text("done")

        wait_until(lambda: pid.exists() and pid.read_text(), "the other rank runs")
        atexit.register(work)
        raise LookupError("failed")

    with pytest.raises(LookupError):
        distribute(2).run(program)
    assert (tmp_path / "note").read_text() == "done"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no supervisors")
@cluster_is_slow
def test_what_a_rank_leaves_in_its_group_ends_while_others_run(
    distribute: Distribute, tmp_path: Path
) -> None:
    def program() -> None:
        note = tmp_path / "child"
        if my_rank() == 1:
            if (child := os.fork()) == 0:
                signal.pause()
            note.with_suffix(".part").write_text(str(child))
            note.with_suffix(".part").rename(note)
            return
        wait_until(note.exists, "the other rank has a child")
        until(lambda: not runs(int(note.read_text())), "the child ends with its parent")

    distribute(2).run(program)


def test_children_of_a_rank_work(distribute: Distribute) -> None:
    def program() -> dict[str, object]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        done: dict[str, object] = {}
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                done[method] = pool.map(math.factorial, [3, 5])
        data = TensorDataset(torch.arange(40))
        loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
        done["loader"] = sum(int(batch.sum()) for (batch,) in loader)
        unfinished = iter(loader)
        next(unfinished)
        vars(builtins)["kept alive"] = unfinished
        return done

    expected = {"fork": [6, 120], "spawn": [6, 120], "loader": sum(range(40))}
    assert distribute(1).run(program) == expected


def test_forked_children_do_not_report_for_their_rank(distribute: Distribute) -> None:
    def program() -> object:
        codes = {}
        for way in ("return", "raise", "exit 0", "exit 3"):
            child = os.fork()
            if child:
                codes[way] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            elif way == "raise":
                raise ValueError("the child's")
            elif way == "return":
                return "the child's"
            else:
                sys.exit(int(way[-1]))
        return codes

    codes = {"return": 0, "raise": 1, "exit 0": 0, "exit 3": 3}
    assert distribute(1).run(program) == codes


def state_of_this_process() -> dict[str, Any]:
    """Return all global state of this process that a launcher might change."""
    import numpy as np
    import torch

    loggers = [logging.root, *map(logging.getLogger, sorted(logging.root.manager.loggerDict))]
    return {
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "process group": torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "folder": os.getcwd(),
        "arguments": list(sys.argv),
        "path": list(sys.path),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "faulthandler": faulthandler.is_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "warnings": list(warnings.filters),
        "socket timeout": socket.getdefaulttimeout(),
        "loggers": {
            logger.name: (logger.level, logger.propagate, logger.disabled, [*logger.handlers])
            for logger in loggers
        },
    }


def open_files() -> set[str]:
    """Return the open descriptors of this process, by number and target."""
    found = set()
    for number in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the descriptor that lists the folder
            found.add(f"{number} {os.readlink(f'/dev/fd/{number}')}")
    return found


def children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(task.read_text().split())
    return found


def state_of_spark() -> dict[str, Any]:
    from pyspark.sql import SparkSession

    context = SparkSession.active().sparkContext
    return {
        "conf": sorted(context.getConf().getAll()),
        "tags": context.getJobTags(),
        "group": context.getLocalProperty("spark.jobGroup.id"),
        "python": context.pythonExec,
    }


@pytest.mark.parametrize("ending", ["value", "failure"])
def test_nothing_in_the_drivers_process_changes(
    distribute: Distribute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    def program() -> int:
        random.seed(1)
        os.chdir("/")
        logging.basicConfig(level=logging.DEBUG)
        if ending == "failure":
            raise ValueError(ending)
        return my_rank()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_DRIVER", "1")
    distributor = distribute(2, env={"OF_THE_RANKS": "1"})
    if distributor.local_mode:
        distributor.run(os.getpid)  # starts the warm process
    random.seed(1234)
    before, threads = state_of_this_process(), set(threading.enumerate())
    files, processes = open_files(), children()
    spark_before = {} if distributor.local_mode else state_of_spark()

    if ending == "value":
        assert distributor.run_all(program) == [0, 1]
    else:
        with pytest.raises(ValueError, match=ending):
            distributor.run_all(program)

    after = state_of_this_process()
    assert {name for name in before if before[name] != after[name]} == set()
    wait_until(lambda: children() <= processes, "its processes have ended")
    if distributor.local_mode:
        wait_until(lambda: set(threading.enumerate()) <= threads, "its threads have ended")
        assert open_files() == files
    else:  # Py4J keeps connections and threads for later calls
        assert state_of_spark() == spark_before
