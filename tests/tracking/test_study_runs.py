"""Studies in MLflow: a run for the study, and inside it one for each trial."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.tracking_server import PRELOAD, metrics_of, mlflow, needs_mlflow, runs_of

from distributor import TorchDistributor, train

optuna: Any = pytest.importorskip("optuna")
optimize = pytest.importorskip("distributor.tune").optimize
pytestmark = needs_mlflow
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def log(number: int, lr: float) -> None:
    import mlflow

    if number == 2:
        raise KeyError("bad")
    mlflow.log_metric("of_ranks", number)
    for loss in (0.5, 2.0 if number == 1 else 0.25):
        train.report({"loss": loss})


def test_trials_are_children_of_the_studys_run(experiment: str, tmp_path: Path) -> None:
    """With parameters, what they report and end with, and what their ranks log."""
    pruner = optuna.pruners.ThresholdPruner(upper=1.0)
    study = optuna.create_study(study_name="mine", pruner=pruner)
    optimize(
        *(study, log, lambda trial: (trial.number, trial.suggest_float("lr", 0, 1))),
        TorchDistributor(1, use_gpu=False, preload=PRELOAD, storage_path=tmp_path),
        **{"n_trials": 3, "metric": "loss", "catch": KeyError, "n_jobs": 1},
    )
    runs = {run.info.run_name: run for run in runs_of(experiment)}
    assert {name: run.info.status for name, run in runs.items()} == {
        "mine": "FINISHED",
        "trial 0": "FINISHED",
        "trial 1": "KILLED",
        "trial 2": "FAILED",
    }
    for trial in study.trials:
        data = runs[f"trial {trial.number}"].data
        assert data.tags["mlflow.parentRunId"] == runs["mine"].info.run_id
        assert data.params == {"lr": str(trial.params["lr"])}
    assert metrics_of(runs["trial 0"]) == {"of_ranks": 0.0, "loss": 0.25, "value": 0.25}
    history = mlflow.MlflowClient().get_metric_history(runs["trial 1"].info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 2.0)]
    assert runs["trial 2"].data.tags["distributor.error"] == "KeyError: 'bad'"
