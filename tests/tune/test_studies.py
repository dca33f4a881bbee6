"""Studies of functions, trainers and @distributed functions, on ranks of this machine."""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.ranks import wait_to_be_stopped, wait_until
from support.training import here
from support.waiting import DEADLINE, alive, comes_true

from distributor import TorchDistributor, distributed, train
from distributor.train.torch import TorchTrainer

optuna: Any = pytest.importorskip("optuna")
optimize = pytest.importorskip("distributor.tune").optimize
cloudpickle.register_pickle_by_value(sys.modules[__name__])
COMPLETE, FAIL = "COMPLETE", "FAIL"
PAIR = TorchDistributor(2, use_gpu=False, timeout=120)


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


def square(x: float, y: int) -> float:
    return (x - 1) ** 2 + y if os.environ["RANK"] == "0" else -1.0


def square_space(trial: Any) -> Any:
    x = trial.suggest_float("x", -2, 2)
    return {"y": trial.suggest_int("y", 0, 3), "x": x} if x < 0 else (x, 0)


def test_trials_are_those_of_optunas_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what rank 0 returns, arguments in a dict or a tuple, and callbacks in this thread."""
    sampler, ended = optuna.samplers.TPESampler, list[tuple[int, str, threading.Thread]]()
    ours, theirs = (
        optuna.create_study(sampler=sampler(seed=3, n_startup_trials=3)) for _ in range(2)
    )

    def note(study: Any, trial: Any) -> None:
        assert study is ours
        ended.append((trial.number, trial.state.name, threading.current_thread()))

    def objective(trial: Any) -> float:
        found = square_space(trial)
        return square(**found) if isinstance(found, dict) else square(*found)

    optimize(ours, square, square_space, PAIR, n_trials=8, n_jobs=1, callbacks=[note])
    monkeypatch.setenv("RANK", "0")
    theirs.optimize(objective, n_trials=8)
    results = [[(trial.params, trial.value) for trial in each.trials] for each in (ours, theirs)]
    assert results[0] == results[1]
    assert len({len(params) for params, _ in results[0]}) == 2, "or the seed needs a change"
    assert ended == [(number, COMPLETE, threading.current_thread()) for number in range(8)]


def test_a_study_ends_by_a_callback_or_in_time() -> None:
    study, enough = optuna.create_study(), optuna.study.MaxTrialsCallback(3)
    optimize(study, square, square_space, PAIR, n_jobs=1, callbacks=[enough])
    assert states(study) == [COMPLETE] * 3
    optimize(study, square, square_space, PAIR, timeout=1)
    assert len(study.trials) > 3
    assert set(states(study)) == {COMPLETE}


def numbered(trial: Any) -> tuple[int]:
    return (trial.number,)


def fail_first(number: int) -> float:
    if number == 3:
        raise optuna.TrialPruned
    return {1: 10, 2: float("nan")}[number]


def test_a_study_goes_on_after_an_exception_that_catch_names(
    warned: Callable[[], list[str]],
) -> None:
    """And after a value that Optuna does not accept, and a trial that prunes itself."""
    study, ended = optuna.create_study(), list[str]()
    callbacks = [lambda _, trial: ended.append(trial.state.name)]
    settings = {"n_trials": 4, "n_jobs": 1, "callbacks": callbacks}
    optimize(study, fail_first, numbered, PAIR, catch=(LookupError,), **settings)
    assert states(study) == ended == [FAIL, COMPLETE, FAIL, "PRUNED"]
    assert "KeyError: 0" in study.trials[0].user_attrs.values()
    assert "in fail_first" in "".join(warned())


class UsersError(Exception):
    pass


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


@pytest.mark.parametrize("error", [UsersError, KeyboardInterrupt])
def test_an_exception_leaves_no_trial_and_no_rank(
    tmp_path: Path, error: type[BaseException]
) -> None:
    """A trial's is raised unchanged. All other trials fail."""

    def note_and_wait(number: int) -> None:
        (tmp_path / f"{os.getpid()}").touch()
        wait_until(lambda: len(pids_in(tmp_path)) == 4, "both trials")
        if error is UsersError and number == 1:
            raise UsersError("mine", 17)
        wait_to_be_stopped()

    def interrupt() -> None:
        if comes_true(lambda: len(pids_in(tmp_path)) == 4, DEADLINE):
            _thread.interrupt_main()

    study, waiter = optuna.create_study(), threading.Thread(target=interrupt)
    if error is KeyboardInterrupt:
        waiter.start()
    with pytest.raises(error) as raised:
        optimize(study, note_and_wait, numbered, PAIR, n_jobs=2)
    assert raised.value.args == (("mine", 17) if error is UsersError else ())
    assert states(study) == [FAIL, FAIL]
    assert not alive(pids_in(tmp_path))


def report_all(*reports: dict[str, float]) -> str:
    """Report; of rank 1, other values."""
    own = int(os.environ["RANK"]) * 100
    for report in reports:
        train.report({name: value - own for name, value in report.items()})
    return "not the result"


def test_the_values_are_metrics_that_rank_0_reports(tmp_path: Path) -> None:
    """Or several values that it returns. Steps are numbers of reports, of those without it too."""
    one, several = optuna.create_study(), optuna.create_study(directions=["minimize", "maximize"])
    losses = {"loss": 3.0}, {"lr": 1.0}, {"loss": 1.0}, {"loss": 2.0}
    reporting = TorchDistributor(2, use_gpu=False, timeout=120, storage_path=tmp_path)
    for reduce in ("last", "min", "max"):
        settings = {"metric": "loss", "reduce": reduce}
        optimize(one, report_all, lambda _: losses, reporting, n_trials=1, **settings)
    assert [trial.value for trial in one.trials] == [2.0, 1.0, 3.0]
    assert one.trials[0].intermediate_values == {1: 3.0, 3: 1.0, 4: 2.0}
    reports = {"a": 1, "b": 2}, {"a": 3, "b": 4}
    keys = ["b", "a"]
    optimize(several, report_all, lambda _: reports, reporting, n_trials=1, metric=keys)
    optimize(several, lambda: (0.5, 2), lambda _: (), PAIR, n_trials=1)
    assert [trial.values for trial in several.trials] == [[4.0, 3.0], [0.5, 2.0]]


class Recorder(train.UserCallback):
    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        name, config = run_context.get_run_config().name, run_context.train_loop_config
        assert metrics[0]["name"] == name
        self.found.append((name, config))


def test_a_trainers_trials_are_runs_with_names_of_their_own(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> None:
        name = train.get_context().get_experiment_name()
        train.report({"sum": config["fixed"] + config["lr"], "name": name})

    recorder, settings = Recorder(), {"show_output": "none", "timeout": 120}
    run = train.RunConfig(
        name="mine", storage_path=tmp_path, callbacks=[recorder], settings=settings
    )
    initial = {"fixed": 10, "lr": -1}
    trainer = TorchTrainer(loop, train_loop_config=initial, scaling_config=here(2), run_config=run)
    study = optuna.create_study()
    space = {"n_trials": 2, "n_jobs": 1, "metric": "sum"}
    optimize(study, trainer, lambda trial: {"lr": trial.number}, **space)
    assert [trial.value for trial in study.trials] == [10, 11]
    names, configs = zip(*recorder.found, strict=True)
    assert configs == ({"fixed": 10, "lr": 0}, {"fixed": 10, "lr": 1})
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert len(set(names)) == 2


def test_a_distributed_function_knows_how_it_runs() -> None:
    @distributed(gpus=2, use_gpu=False, timeout=120)
    def world_size(number: int) -> int:
        return number + int(os.environ["WORLD_SIZE"])

    study = optuna.create_study()
    optimize(study, world_size, lambda trial: {"number": trial.number}, n_trials=1)
    assert study.best_value == 2
