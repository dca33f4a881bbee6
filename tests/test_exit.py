"""The end of a script whose runs are still active: it waits for them, and shows their errors."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import needs_java, needs_late_threads
from support.driver_process import driver, read_pids
from support.waiting import assert_gone

from distributor.control import future
from distributor.control.cancellation import Cancellation
from distributor.control.future import RunFuture

RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]

SCRIPT = """
import multiprocessing, sys, time
from pathlib import Path
from distributor import TorchDistributor

def wait_for(file):
    deadline = time.monotonic() + 120
    while not Path(file).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)

def succeed():
    wait_for("script_ended")
    Path("value").touch()

def fail(what):
    wait_for("script_ended")
    raise KeyError(what)

def collect():
    try:
        runner.submit(int, "no number").result()
    except ValueError:
        print("collected", flush=True)

if __name__ == "__main__":
    {spark}
    runner = TorchDistributor(1, local_mode={local_mode}, use_gpu=False, timeout=120)
    futures = [runner.submit(succeed), runner.submit(fail, "of a run that is kept")]
    runner.submit(fail, "of a run that is dropped")
    collect()
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(60)
    print("child", child.exitcode, flush=True)
    Path("script_ended").touch()
"""
SPARK = """
    from pyspark.sql import SparkSession
    builder = SparkSession.builder.master("local[4]")  # a core for each run
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
"""


@pytest.mark.parametrize(
    "session",
    [
        pytest.param("", id="local"),
        pytest.param(
            SPARK.strip(), id="cluster", marks=[pytest.mark.slow, pytest.mark.spark, needs_java]
        ),
    ],
)
def test_a_script_waits_for_its_runs_and_shows_their_errors(
    run_driver: RunDriver, tmp_path: Path, session: str
) -> None:
    done = run_driver(SCRIPT.format(spark=session, local_mode=not session))

    assert (tmp_path / "value").exists(), "the run went on after the script's end"
    assert done.stdout.split("\n")[:2] == ["collected", "child 0"], "a forked process has no runs"
    assert "Waiting for 3 runs (" in done.stderr
    assert done.stderr.count("Waiting for") == 1, "it waits without asking again and again"
    assert done.stderr.count("The run of fail failed:") == 2
    for what in ("kept", "dropped"):
        assert f"KeyError: 'of a run that is {what}'" in done.stderr
    assert "no number" not in done.stderr, "the script has read this error"


class SlowRun(RunFuture[None]):
    """A run during whose inspection another run ends."""

    other: SlowRun

    def done(self) -> bool:
        self.other._follow()
        return super().done()

    def _follow(self) -> None:
        if not super().done():
            super()._follow()


def test_runs_may_end_while_a_script_looks_for_those_that_are_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[Any] = [
        SimpleNamespace(
            spec=SimpleNamespace(program=SimpleNamespace(name=name)), cancellation=Cancellation()
        )
        for name in ("one", "other")
    ]
    one, other = (SlowRun(lambda: None, run) for run in runs)
    one.other, other.other = other, one
    monkeypatch.setattr(future, "_open_runs", {one, other})
    future._await_open_runs()
    assert future._open_runs == set()


STAY = """
import os, threading
from distributor import TorchDistributor

def stay():
    print("pid", os.getpid(), flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    runner = TorchDistributor(2, use_gpu=False, timeout=120)
    runner.submit(stay)
    runner.submit(stay)
"""


@needs_late_threads
def test_ctrl_c_at_the_end_of_a_script_cancels_its_runs(tmp_path: Path) -> None:
    with driver(STAY, tmp_path) as (process, _):
        ranks = read_pids(process, 4)
        process.send_signal(signal.SIGINT)
        process.wait(60)

        assert_gone(ranks)
