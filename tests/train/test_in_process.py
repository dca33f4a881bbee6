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
from distributor.screen.messages import warn_once
from distributor.train import Checkpoint, RunConfig, ScalingConfig, collective
from distributor.train.torch import TorchTrainer, prepare_data_loader, prepare_model

torch = pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def raise_error(error: Exception) -> None:
    raise error


def fit(func: Any, **options: Any) -> train.Result:
    scaling = ScalingConfig(num_workers=0)
    return TorchTrainer(func, scaling_config=scaling, **options).fit()


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


def test_the_function_runs_in_the_calling_thread(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        context = train.get_context()
        assert (context.get_world_size(), context.get_world_rank()) == (1, 0)
        assert (context.get_experiment_name(), train.get_checkpoint()) == ("mine", None)
        with pytest.raises(NotImplementedError, match="no storage"):
            context.get_storage()
        train.report({"loss": 2.0}, checkpoint=Checkpoint.from_directory(tmp_path))
        train.report({"loss": 1.0})
        assert train.get_checkpoint() == Checkpoint.from_directory(tmp_path)
        collective.barrier()
        assert collective.broadcast_from_rank_zero("data") == "data"
        assert type(prepare_model(torch.nn.Linear(1, 1))) is torch.nn.Linear
        loader = prepare_data_loader(torch.utils.data.DataLoader(range(4)))  # type: ignore[arg-type]
        return os.getpid(), threading.get_ident(), len(list(loader)), config

    result = fit(loop, train_loop_config={"a": 1}, run_config=RunConfig("mine"))

    value = (os.getpid(), threading.get_ident(), 4, {"a": 1})
    assert result == train.Result(
        {"loss": 1.0}, Checkpoint.from_directory(tmp_path), None, None, return_value=value
    )
    error = KeyError("a bug")
    with pytest.raises(KeyError) as raised:
        fit(lambda: raise_error(error))
    assert raised.value is error
    with pytest.raises(RuntimeError, match="report and get_checkpoint can only be called by"):
        train.report({})
