"""What ranks leave behind, and what a run leaves unchanged in the driver's process."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
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
    wait_until,
)
from support.waiting import runs, until

from distributor import WorkerDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("failed", [False, True], ids=["success", "failure"])
@cluster_is_slow
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


@cluster_is_slow
def test_forked_children_do_not_report_for_their_rank(distribute: Distribute) -> None:
    def program() -> object:
        codes = {}
        for way in ("return", "raise", "exit"):
            child = os.fork()
            if child:
                codes[way] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            elif way == "raise":
                raise ValueError("the child's")
            elif way == "return":
                return "the child's"
            else:
                sys.exit(3)
        return codes

    assert distribute(1).run(program) == {"return": 0, "raise": 1, "exit": 3}


def state_of_this_process() -> dict[str, Any]:
    """Return all global state of this process that a launcher might change."""
    import numpy as np
    import torch

    loggers = [logging.root, *map(logging.getLogger, sorted(logging.root.manager.loggerDict))]
    return {
        "random": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "process group": torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "place": (os.getcwd(), list(sys.argv), list(sys.path)),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "faulthandler": faulthandler.is_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "warnings": list(warnings.filters),
        "socket timeout": socket.getdefaulttimeout(),
        "loggers": [(each.name, each.level, each.propagate, [*each.handlers]) for each in loggers],
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


@cluster_is_slow
def test_nothing_in_the_drivers_process_changes(
    distribute: Distribute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(fails: bool) -> int:
        random.seed(1)
        os.chdir("/")
        logging.basicConfig(level=logging.DEBUG)
        if fails:
            raise ValueError("of a rank")
        return my_rank()

    def files_stay() -> bool:
        found = open_files()
        return not threading.Event().wait(0.2) and open_files() == found

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_DRIVER", "1")
    distributor = distribute(2, env={"OF_THE_RANKS": "1"})
    if distributor.local_mode:
        distributor.run(os.getpid)  # starts the warm process
        wait_until(files_stay, "its connections are closed")
    random.seed(1234)
    before, threads = state_of_this_process(), set(threading.enumerate())
    files, processes = open_files(), children()
    spark_before = {} if distributor.local_mode else state_of_spark()

    assert distributor.run_all(program, False) == [0, 1]
    with pytest.raises(ValueError, match="of a rank"):
        distributor.run_all(program, True)

    after = state_of_this_process()
    assert {name for name in before if before[name] != after[name]} == set()
    wait_until(lambda: children() <= processes, "its processes have ended")
    if distributor.local_mode:
        wait_until(lambda: set(threading.enumerate()) <= threads, "its threads have ended")
        assert open_files() == files
    else:  # Py4J keeps connections and threads for later calls
        assert state_of_spark() == spark_before
