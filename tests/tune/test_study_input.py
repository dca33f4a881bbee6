"""Invalid arguments of `optimize`, in the user's names, and names of Ray Tune."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.training import here

from distributor import DistributorError, TorchDistributor, distributed, train
from distributor.train.torch import TorchTrainer

optuna: Any = pytest.importorskip("optuna")
tune: Any = pytest.importorskip("distributor.tune")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
INVALID = (TypeError, ValueError)
ONE = TorchDistributor(1, use_gpu=False, timeout=120)
PRUNER = optuna.pruners.HyperbandPruner()
TWO = ["minimize", "maximize"]


def identity(x: float = 0.0) -> float:
    return x


def none() -> None:
    train.report({"loss": 1.0})


def trainer(loop: Any = identity, workers: int = 1) -> TorchTrainer:
    return TorchTrainer(loop, scaling_config=here(workers))


ON_CPU = distributed(gpus=1, use_gpu=False)(identity)
AT_ONCE: list[tuple[dict[str, Any], str]] = [
    ({"train": 3}, "train must be a function, a TorchTrainer or a @distributed"),
    ({"space": {"x": 1}}, "space must be a function of a trial"),
    ({"distributor": None}, r"such as TorchDistributor\(2\)"),
    ({"train": trainer()}, "is a TorchTrainer.* leave out distributor"),
    ({"train": ON_CPU}, "is a DistributedFunction.* leave out distributor"),
    ({"train": trainer(workers=0), "distributor": None}, r"ScalingConfig\(num_workers=0\)"),
    ({"metric": ["a", "b"]}, "2 of the 1 keys"),
    ({"metric": [3]}, "metric must be a key of train.report"),
    ({"metric": "a", "reduce": "mean"}, "reduce must be 'last', 'min' or 'max'"),
    ({"metric": "a"}, "pass a storage_path"),
    ({"pruner": PRUNER}, "HyperbandPruner.* pass metric"),
    ({"pruner": PRUNER, "directions": TWO}, "2 directions.* HyperbandPruner"),
    ({"n_trials": -1}, "n_trials"),
    ({"n_jobs": 0}, "n_jobs"),
    ({"timeout": -1}, "timeout"),
    ({"catch": (3,)}, "catch must be"),
    ({"callbacks": 3}, "callbacks must be"),
]


@pytest.mark.parametrize(("arguments", "text"), AT_ONCE, ids=lambda each: "-".join(each))
def test_an_invalid_argument_costs_no_trial(arguments: dict[str, Any], text: str) -> None:
    valid = {"train": identity, "space": lambda _: (), "distributor": ONE, "n_trials": 1}
    settings = valid | arguments
    of_study = {name: settings.pop(name, None) for name in ("pruner", "directions")}
    study = optuna.create_study(**of_study)
    with pytest.raises(INVALID, match=text):
        tune.optimize(study, **settings)
    assert study.trials == []


@pytest.mark.spark
def test_trials_of_more_ranks_than_slots_cost_no_trial(spark: Any) -> None:
    study, many = optuna.create_study(), TorchDistributor(99, local_mode=False, use_gpu=False)
    with pytest.raises(DistributorError, match="99"):
        tune.optimize(study, identity, lambda _: (), many, n_trials=1)
    assert study.trials == []


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (identity, [1.0], r"space must return a dict .* has returned \[1\.0\]"),
        (identity, {"y": 1}, "identity.*'y'"),
        (identity, (1, 2), "identity.*positional"),
        (trainer(), (1,), r"space must return a dict.*\(1,\)"),
        (trainer(none), {"x": 1}, "none has no parameter"),
        (none, {}, "metric acc as a number"),
        (str, ("x",), "Rank 0 of trial 0 has returned 'x', but a number is wanted"),
        (type(None), (), "Rank 0 of trial 0 has returned None, but a number is wanted"),
    ],
)
def test_what_the_function_does_not_take_or_return(
    function: Any, arguments: Any, text: str, tmp_path: Path
) -> None:
    """The trial has failed, and the study ends."""
    study, metric = optuna.create_study(), "acc" if function is none else None
    reporting = TorchDistributor(1, use_gpu=False, timeout=120, storage_path=tmp_path)
    distributor = None if isinstance(function, TorchTrainer) else reporting
    settings = {"n_trials": 2, "n_jobs": 1, "metric": metric}
    with pytest.raises(INVALID, match=text):
        tune.optimize(study, function, lambda _: arguments, distributor, **settings)
    assert [trial.state.name for trial in study.trials] == ["FAIL"]


def test_an_interrupted_space_leaves_no_trial() -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    study = optuna.create_study()
    with pytest.raises(KeyboardInterrupt):
        tune.optimize(study, identity, interrupt, ONE)
    assert [trial.state.name for trial in study.trials] == ["FAIL"]


def test_names_of_ray_tune_are_refused() -> None:
    for name in ("Tuner", "choice", "report", "run"):
        with pytest.raises(NotImplementedError, match=rf"^distributor\.tune\.{name}: Ray Tune's"):
            getattr(tune, name)
    with pytest.raises(NotImplementedError, match=r"distributor\.tune\.optimize\(study, train"):
        importlib.import_module("distributor.tune.schedulers")
    assert not hasattr(tune, "optimise")
