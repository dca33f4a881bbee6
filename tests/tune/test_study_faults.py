"""Killed ranks, executors and drivers in the middle of a study, and two drivers of one study."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support import reports
from support.driver_process import driver
from support.ranks import my_rank, wait_until
from support.reports import count_on
from support.waiting import DEADLINE, assert_gone, marked, until

from distributor import TorchDistributor

optuna: Any = pytest.importorskip("optuna")
optimize = pytest.importorskip("distributor.tune").optimize
for module in (sys.modules[__name__], reports):
    cloudpickle.register_pickle_by_value(module)
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


def count_and_die(folder: Path, number: int) -> int:
    begin, _ = count_on(folder / str(number), 2)
    if number == 1 and begin == 0 and my_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return begin


def test_a_killed_rank_costs_its_trial_an_attempt(tmp_path: Path) -> None:
    """The next one resumes from the trial's own checkpoint."""
    study, ended = optuna.create_study(), list[int]()
    where = {"use_gpu": False, "storage_path": tmp_path / "runs"}
    optimize(
        *(study, count_and_die, lambda trial: (tmp_path, trial.number)),
        TorchDistributor(2, **where, timeout=120, max_failures=1),
        n_trials=3,
        callbacks=[lambda _, trial: ended.append(trial.number)],
    )
    assert sorted(ended) == [0, 1, 2]
    assert [trial.value for trial in study.trials] == [0, 2, 0]


PROGRAM = """
import os, sys, time
from pathlib import Path
import optuna
from distributor import TorchDistributor, train  # reports need torch
from distributor.tune import drivers, optimize

drivers.ALIVE_SECONDS, drivers.SILENT_SECONDS = 0.1, 2.0
folder, n_trials = Path(sys.argv[1]), int(sys.argv[2])
is_local = len(sys.argv) == 3

def loop(number, x):
    resumed = train.get_checkpoint() is not None
    mine = folder / f"{number}-{os.environ['RANK']}"
    mine.mkdir(exist_ok=True)
    train.report({"loss": 5.0}, checkpoint=train.Checkpoint.from_directory(str(mine)))
    if number == 2 and not resumed:
        print("waits", flush=True)
        if not is_local and os.environ["RANK"] == "1":
            import psutil
            # The executor's JVM: a warm process may outlive the Python worker that has started it.
            wanted = {"name": "java", "cwd": os.getcwd()}  # of a zombie, the folder is None
            next(each for each in psutil.process_iter([*wanted]) if each.info == wanted).kill()
        time.sleep(1000)
    train.report({"loss": x + 10 * resumed})

if __name__ == "__main__":
    if not is_local:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        from pyspark.sql import SparkSession
        builder = SparkSession.builder.master("local-cluster[2,2,1024]")
        builder.config("spark.ui.enabled", "false").config("spark.log.level", "OFF").getOrCreate()
    where = {"study_name": "s", "storage": f"sqlite:///{folder}/study.db"}
    study = optuna.load_study(**where, pruner=optuna.pruners.NopPruner())
    settings = {"use_gpu": False, "timeout": 250, "storage_path": folder / "runs"}
    ranks = TorchDistributor(2, local_mode=is_local, max_failures=1, **settings)
    space = lambda trial: (trial.number, trial.suggest_float("x", 0, 1))
    optimize(study, loop, space, ranks, n_trials=n_trials, metric="loss", n_jobs=1)
"""


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    return optuna.create_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db")


def test_a_killed_drivers_trial_is_repeated_from_its_checkpoint(
    stored: Any, tmp_path: Path, run_driver: RunDriver
) -> None:
    with driver(PROGRAM, tmp_path, str(tmp_path), "6") as (process, mark):
        assert process.stdout
        assert any("waits" in line for line in process.stdout)
        until(lambda: stored.trials[2].intermediate_values, "the report is in the storage")
        left = marked(mark)
        process.kill()
        assert_gone(left)
    before = stored.trials
    assert states(stored) == ["COMPLETE", "COMPLETE", "RUNNING"]
    time.sleep(2)  # then the driver is silent

    run_driver(PROGRAM, str(tmp_path), "4")

    assert states(stored) == ["COMPLETE", "COMPLETE", "FAIL", *["COMPLETE"] * 4]
    after = stored.trials
    assert [trial.value for trial in after[:2]] == [trial.value for trial in before[:2]]
    [repeated] = (trial for trial in after[3:] if trial.params == before[2].params)
    assert repeated.value == repeated.params["x"] + 10
    assert repeated.intermediate_values == {1: 5.0, 2: 5.0, 3: repeated.value}


@pytest.mark.slow(ci=True)
@pytest.mark.spark
def test_a_killed_executor_costs_its_trial_an_attempt(
    stored: Any, tmp_path: Path, run_driver: RunDriver
) -> None:
    run_driver(PROGRAM, str(tmp_path), "4", "cluster")
    assert states(stored) == ["COMPLETE"] * 4
    assert [int(trial.value) for trial in stored.trials] == [0, 0, 10, 0]


def test_two_drivers_of_one_study_leave_each_others_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One's trial runs on, longer than a driver may be silent, while the other looks for dead."""
    monkeypatch.setattr("distributor.tune.drivers.ALIVE_SECONDS", 0.1)
    monkeypatch.setattr("distributor.tune.drivers.SILENT_SECONDS", 3.0)
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    where = {"study_name": "s", "storage": optuna.storages.JournalStorage(journal)}
    study, other = optuna.create_study(**where), optuna.load_study(**where)
    begun, enough = tmp_path / "begun", tmp_path / "enough"
    one = TorchDistributor(1, use_gpu=False, timeout=120)

    def wait(number: int) -> int:
        if number == 0:
            begun.touch()
            wait_until(enough.exists, "the other driver's trials")
        return number

    def space(trial: Any) -> tuple[int]:
        return (trial.number,)

    thread = threading.Thread(target=lambda: optimize(other, wait, space, one, n_trials=1))
    thread.start()
    until(begun.exists, "the first trial", DEADLINE)
    optimize(study, wait, space, one, timeout=5, n_jobs=1)
    assert states(study)[:2] == ["RUNNING", "COMPLETE"]
    enough.touch()
    thread.join()
    assert set(states(study)) == {"COMPLETE"}
