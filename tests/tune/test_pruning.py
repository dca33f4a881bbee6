"""Pruned trials: their ranks are gone and their slots free at once, whatever they compute."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import Distribute
from support.waiting import SOON, alive

from distributor import train

optuna: Any = pytest.importorskip("optuna")
optimize = pytest.importorskip("distributor.tune").optimize
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def report_and_compute(number: int, folder: Path) -> None:
    (folder / f"{number}-{os.getpid()}").touch()
    train.report({"loss": 0.5})
    if number == 1:
        (folder / "at").write_text(str(time.time()))
        train.report({"loss": 2.0})
        if train.get_context().get_world_rank() == 0:
            sum(itertools.repeat(0))  # in C, which no signal interrupts
        while True:
            pass


@cluster_is_slow
def test_a_trial_is_pruned_whatever_its_ranks_compute(
    distribute: Distribute, tmp_path: Path
) -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))
    notes, ends = tmp_path / "notes", dict[int, float]()
    notes.mkdir()

    def end(_: Any, trial: Any) -> None:
        ends[trial.number] = time.time()
        assert not alive(int(note.name[2:]) for note in notes.glob(f"{trial.number}-*"))

    optimize(
        *(study, report_and_compute, lambda trial: (trial.number, notes)),
        distribute(2, storage_path=tmp_path / "runs"),
        n_trials=3,
        metric="loss",
        n_jobs=1,
        callbacks=[end],
    )
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert study.trials[1].intermediate_values == {1: 0.5, 2: 2.0}
    assert len([*notes.iterdir()]) == 7
    assert ends[1] - float((notes / "at").read_text()) < SOON
