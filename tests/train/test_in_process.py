"""``ScalingConfig(num_workers=0)``: the training function runs in the process of ``fit``."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from distributor import TorchDistributor, train
from distributor.screen.one_time_warnings import warn_once
from distributor.train import Checkpoint, RunConfig, ScalingConfig, collective
from distributor.train.torch import TorchTrainer, get_devices, prepare_data_loader, prepare_model

torch = pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def fit(func: Any, **options: Any) -> train.Result:
    scaling = ScalingConfig(num_workers=0)
    return TorchTrainer(func, scaling_config=scaling, **options).fit()


def test_the_function_runs_in_the_calling_thread(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def loop(config: dict[str, Any]) -> int:
        context = train.get_context()
        seen["process"] = os.getpid(), threading.get_ident()
        seen["context"] = context.get_world_size(), context.get_world_rank()
        seen["name"] = context.get_experiment_name()
        with pytest.raises(NotImplementedError, match="no storage"):
            context.get_storage()
        with pytest.raises(KeyError, match="There is no dataset 'train'"):
            train.get_dataset_shard(train.TRAIN_DATASET_KEY)
        assert train.get_checkpoint() is None
        train.report({"loss": 2.0}, checkpoint=Checkpoint.from_directory(tmp_path))
        assert train.get_checkpoint() == Checkpoint.from_directory(tmp_path)
        train.report({"loss": 1.0})
        assert train.get_all_reported_checkpoints() == []
        assert train.get_preemption_info() is None
        collective.barrier()
        assert collective.broadcast_from_rank_zero("data") == "data"
        model = prepare_model(torch.nn.Linear(1, 1))
        loader = prepare_data_loader(torch.utils.data.DataLoader(range(4)))  # type: ignore[arg-type]
        assert (type(model), len(list(loader))) == (torch.nn.Linear, 4)
        return len(get_devices()) + int(config["a"])

    result = fit(loop, train_loop_config={"a": 1}, run_config=RunConfig("mine"))

    assert seen["process"] == (os.getpid(), threading.get_ident())
    assert (seen["context"], seen["name"]) == ((1, 0), "mine")
    assert result == train.Result(
        {"loss": 1.0}, Checkpoint.from_directory(tmp_path), None, None, return_value=2
    )
    shown = capfd.readouterr().err
    assert shown == (
        "TorchTrainer runs the training function in this process, because num_workers is 0.\n"
    )
    with pytest.raises(RuntimeError, match="report and get_checkpoint can only be called by"):
        train.report({})


def test_its_exceptions_are_raised_as_they_are() -> None:
    error = KeyError("a bug")

    def loop() -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        fit(loop)
    assert raised.value is error
    with pytest.raises(RuntimeError, match="can only be called by the ranks"):
        train.get_checkpoint()


@pytest.mark.parametrize(
    ("loop", "with_configuration", "without"),
    [
        (lambda config: config, {"a": 1}, {}),
        (lambda config, epochs=3: (config, epochs), ({"a": 1}, 3), ({}, 3)),
        (lambda *args: args, ({"a": 1},), ({},)),
        (lambda epochs=3: epochs, 3, 3),
    ],
)
def test_what_a_training_function_is_called_with(
    loop: Any, with_configuration: Any, without: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    assert fit(loop).return_value == without
    assert "is not passed" not in caplog.text
    assert fit(loop, train_loop_config={"a": 1}).return_value == with_configuration
    warned = "train_loop_config is not passed to <lambda>, which has no parameter without a default"
    assert (warned in caplog.text) == (with_configuration == without)


def test_processes_that_torchrun_has_started_train_together() -> None:
    """Ranks have torchrun's environment."""

    def loop() -> Any:
        rank = train.get_context().get_world_rank()
        collective.barrier()
        numbers = torch.ones(1)
        torch.distributed.all_reduce(numbers)
        return collective.broadcast_from_rank_zero([rank]), int(numbers), torch.distributed

    def run() -> Any:
        [of_zero], total, group = fit(loop).return_value
        return of_zero, total, group.is_initialized()

    values = TorchDistributor(2, use_gpu=False, timeout=120).run_all(run)
    assert values == [(0, 2, False)] * 2
