"""The configuration of a `TorchTrainer`: what is accepted and refused, and what it means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import plain
from support.training import here

from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    Result,
    RunConfig,
    ScalingConfig,
    SyncConfig,
)
from distributor.train.torch import TorchConfig, TorchTrainer


async def sleep() -> None: ...


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: ScalingConfig(num_workers=-1), ValueError, "num_workers has to be .*, but is -1"),
    (lambda: ScalingConfig(num_workers=(3, 2)), ValueError, "minimum is greater than the maximum"),
    (lambda: ScalingConfig(use_gpu="True"), TypeError, "use_gpu must be True or False, but is"),
    (
        lambda: ScalingConfig(resources_per_worker={"CPU": 2}),
        ValueError,
        r"ScalingConfig: resources_per_worker is .* not supported on Spark.*spark\.task\.cpus",
    ),
    (
        lambda: ScalingConfig(placement_strategy="STRICT_SPREAD"),
        DeprecationWarning,
        "placement_strategy is 'STRICT_SPREAD', which is not supported on Spark",
    ),
    (lambda: ScalingConfig(accelerator_type="H100"), ValueError, "'H100', but use_gpu is False"),
    (lambda: ScalingConfig(resources_per_worker={"TPU": 1}), ValueError, "has TPUs, but use_tpu"),
    (lambda: ScalingConfig(label_selector=[{"a": "b"}]), ValueError, "label_selector is "),
    (lambda: ScalingConfig(num_worker=2), TypeError, "Did you mean 'num_workers'"),  # type: ignore[call-arg]
    (lambda: FailureConfig(fail_fast=True), DeprecationWarning, "Pass max_failures=0"),
    (lambda: FailureConfig(max_failures=-2), ValueError, "-1 for no limit, but is -2"),
    (lambda: FailureConfig(controller_failure_limit=2), ValueError, "controller_failure_limit is"),
    (lambda: LoggingConfig("loud"), ValueError, "log_level must be one of .*, but is 'loud'"),
    (lambda: DataConfig("train"), TypeError, "datasets_to_split must be 'all' or a list"),
    (lambda: CheckpointConfig(num_to_keep=0), ValueError, "num_to_keep is 0, but the latest"),
    (lambda: CheckpointConfig(checkpoint_score_order="up"), ValueError, "'max' or 'min'"),
    (lambda: TorchConfig(init_method="file"), ValueError, "'env' or 'tcp', but is 'file'"),
    (lambda: RunConfig(".."), ValueError, "RunConfig.name must be the name of a folder"),
    (lambda: RunConfig(stop=3), ValueError, "RunConfig: stop is 3"),
    (lambda: RunConfig(failure_config=3), TypeError, "failure_config must be a FailureConfig"),
    (lambda: RunConfig(sync_config=SyncConfig()), DeprecationWarning, "RunConfig: sync_config is"),
    (
        lambda: RunConfig(worker_runtime_env={"conda": "env"}),
        ValueError,
        r"worker_runtime_env\['conda'\] is 'env', which is not supported.*It takes env_vars, pip",
    ),
    (
        lambda: TorchTrainer(print, run_config=RunConfig(settings={"use_gpu": True})),
        ValueError,
        r"RunConfig.settings has \['use_gpu'\], which other",
    ),
    (
        lambda: TorchTrainer(print, run_config=RunConfig(settings={"timeot": 3})),
        ValueError,
        r"RunConfig.settings has \['timeot'\]. Did you mean 'timeout'\?",
    ),
    (
        lambda: TorchTrainer(print, run_config=RunConfig(storage_path="nobody://knows")),
        ValueError,
        "No file system is known for nobody://knows",
    ),
    (lambda: TorchTrainer(print, metadata={"a": 1}), DeprecationWarning, "metadata is not support"),
    (lambda: TorchTrainer.restore("path"), DeprecationWarning, "the same RunConfig.name"),
    (lambda: TorchTrainer(lambda a, b: None), TypeError, r"but is <lambda>\(a, b\)"),
    (lambda: TorchTrainer(sleep), TypeError, "sleep is an async function: to call it does not"),
    (lambda: TorchTrainer(print, datasets={"a": 1}), TypeError, "Pass a Spark DataFrame, or"),
    (lambda: TorchTrainer(print, run_config={}), TypeError, "run_config must be a RunConfig"),
]


@pytest.mark.parametrize(("create", "kind", "message"), BAD)
def test_bad_input_raises_before_anything_starts(
    create: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        create()
    assert re.search(message, str(caught.value)), str(caught.value)


def test_values_that_change_nothing_are_accepted() -> None:
    ScalingConfig(
        trainer_resources={},
        resources_per_worker={"CPU": 1, "memory": 0},
        placement_strategy="SPREAD",
        label_selector={},
        use_tpu=False,
    )
    ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 1})
    ScalingConfig(elastic_resize_monitor_interval_s=5, label_selector=[{}])
    ScalingConfig(use_gpu=True, accelerator_type="A10G")
    ScalingConfig(placement_strategy="STRICT_PACK", local_mode=True)
    FailureConfig(3, False, -1, 0, False, 0.0)
    CheckpointConfig(2, "loss", "min", checkpoint_at_end=False)
    logging = LoggingConfig("debug")
    RunConfig("a", "b", None, FailureConfig(), CheckpointConfig(), [], {}, logging, verbose=0)
    TorchTrainer(
        print, scaling_config=here(), datasets={}, dataset_config=DataConfig(), metadata={}
    )


def test_a_runtime_environment_becomes_settings() -> None:
    run = RunConfig(
        worker_runtime_env={"env_vars": {"A": "1"}, "pip": ["einops"], "py_modules": [plain, "b"]},
        settings={"env": {"B": "2"}},
    )
    assert run.all_settings() == {
        "env": {"A": "1", "B": "2"},
        "environment": ["einops"],
        "py_modules": ["support.plain", "b"],
    }


def test_the_best_checkpoint_of_a_result(tmp_path: Path) -> None:
    result = Result({"a": 1}, None, None, "/x")
    first, second = Checkpoint("/bucket/ckpt0"), Checkpoint("/bucket/ckpt1")
    result.best_checkpoints = [(first, {"val": {"loss": 1.0}}), (second, {"val": {"loss": 2.0}})]
    assert result.get_best_checkpoint("val/loss", "min") is first
    assert result.get_best_checkpoint("val/loss", "max") is second
    with pytest.raises(RuntimeError, match="number 'loss'; the latest metrics are "):
        result.get_best_checkpoint("loss", "max")
    with pytest.raises(RuntimeError, match=f"There is no training run in {tmp_path}"):
        Result.from_path(tmp_path)
