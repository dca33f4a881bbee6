"""The end of a script whose runs are still active: it waits for them, and shows their errors."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from conftest import needs_late_threads
from support.driver_process import driver, read_pids
from support.waiting import assert_gone

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
    runner = TorchDistributor(1, use_gpu=False, timeout=120)
    futures = [runner.submit(succeed), runner.submit(fail, "of a run that is kept")]
    runner.submit(fail, "of a run that is dropped")
    collect()
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(60)
    print("child", child.exitcode, flush=True)
    Path("script_ended").touch()
"""


def test_a_script_waits_for_its_runs_and_shows_their_errors(
    run_driver: RunDriver, tmp_path: Path
) -> None:
    done = run_driver(SCRIPT)

    assert (tmp_path / "value").exists(), "the run went on after the script's end"
    assert done.stdout.split("\n")[:2] == ["collected", "child 0"], "a forked process has no runs"
    assert "Waiting for 3 runs (" in done.stderr
    assert done.stderr.count("Waiting for") == 1, "it waits without asking again and again"
    assert done.stderr.count("The run of fail failed:") == 2
    for what in ("kept", "dropped"):
        assert f"KeyError: 'of a run that is {what}'" in done.stderr
    assert "no number" not in done.stderr, "the script has read this error"


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
