"""How many trials run at once, on which GPUs and slots, and what they share."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.gpus import RunGpuDriver
from support.ranks import wait_until

from distributor import TorchDistributor

optuna: Any = pytest.importorskip("optuna")
optimize = pytest.importorskip("distributor.tune").optimize
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_trials_of_a_machine_have_gpus_of_their_own(run_gpu_driver: RunGpuDriver) -> None:
    """Three GPUs have room for three trials of one rank, or for one of two."""
    facts, _ = run_gpu_driver(
        """
        import tempfile, pathlib, optuna
        from distributor.tune import optimize

        def note(folder, number, at_once):
            (folder / f"{number}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
            while len([*folder.iterdir()]) < number // at_once * at_once + at_once:
                time.sleep(0.02)
            return 0

        for ranks, at_once in (1, 3), (2, 1):
            folder = pathlib.Path(tempfile.mkdtemp())
            space = lambda trial: (folder, trial.number, at_once)
            distributor, count = TorchDistributor(ranks, timeout=120), 2 * at_once
            optimize(optuna.create_study(), note, space, distributor, n_trials=count)
            facts[at_once] = [(folder / f"{number}").read_text() for number in range(count)]
        """,
        CUDA_VISIBLE_DEVICES="3,5,7",
    )
    assert sorted(facts["3"][:3]) == sorted(facts["3"][3:]) == ["3", "5", "7"]
    assert all(len({*mask.split(",")} & {"3", "5", "7"}) == 2 for mask in facts["1"])


def wait_for_others(folder: Path, number: int, at_once: int) -> int:
    """Wait until the trials of the same turn have begun; return the number of ranks."""
    if os.environ["RANK"] == "0":
        (folder / f"{number}").touch()
    turn = number // at_once + 1
    wait_until(lambda: len([*folder.iterdir()]) >= turn * at_once, "the other trials")
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.spark
@pytest.mark.parametrize(
    ("ranks", "n_trials", "at_once", "sizes"),
    [
        pytest.param(2, 4, 2, [2] * 4, id="pairs"),
        pytest.param((1, 9), 2, 2, [2] * 2, id="elastic", marks=pytest.mark.slow(ci=True)),
        pytest.param((2, 9), 1, 1, [4], id="alone", marks=pytest.mark.slow),
        pytest.param(3, 2, 1, [3] * 2, id="of_three", marks=pytest.mark.slow),
    ],
)
def test_as_many_trials_run_at_once_as_fit(
    spark: Any, tmp_path: Path, ranks: Any, n_trials: int, at_once: int, sizes: list[int]
) -> None:
    """Of four slots. No trial waits for them."""
    study, begun = optuna.create_study(), list[int]()

    def space(trial: Any) -> Any:
        begun.append(len(study.get_trials(states=[optuna.trial.TrialState.RUNNING])))
        return tmp_path, trial.number, at_once

    distributor = TorchDistributor(ranks, local_mode=False, use_gpu=False, timeout=120)
    optimize(study, wait_for_others, space, distributor, n_trials=n_trials)
    assert [trial.value for trial in study.trials] == sizes
    assert max(begun) == at_once


@pytest.mark.spark
def test_trials_share_what_is_sent_and_computed(spark: Any) -> None:
    """A DataFrame that `partial` binds or `space` returns, and a program of a megabyte."""
    from pyspark import SparkFiles

    computed = spark.sparkContext.accumulator(0)

    def note(number: int) -> tuple[int]:
        computed.add(1)
        return (number,)

    frame = spark.createDataFrame(spark.sparkContext.range(0, 8, 1, 2).map(note), "id long")
    large = os.urandom(2**20)

    def count(rows: Any, _: int) -> int:
        return len(large) + rows.count()

    def sent() -> int:
        return len([*Path(SparkFiles.getRootDirectory()).glob("distributor-program-*")])

    distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
    bound = functools.partial(count, frame)
    for train, space in (
        (bound, lambda trial: (trial.number,)),
        (count, lambda trial: (frame, trial.number)),
    ):
        before, study = (computed.value, sent()), optuna.create_study()
        optimize(study, train, space, distributor, n_trials=3)
        assert [trial.value for trial in study.trials] == [2**20 + 4] * 3
        assert (computed.value, sent()) == (before[0] + 8, before[1] + 1)
