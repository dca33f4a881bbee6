"""The configuration of a `TorchTrainer`: what is accepted and refused, and what it means."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support import plain

from distributor.train import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
)
from distributor.train.torch import TorchConfig, TorchTrainer


async def sleep() -> None: ...


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: ScalingConfig(num_workers=(3, 2)), ValueError, "minimum is greater than the maximum"),
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
    (lambda: ScalingConfig(label_selector=[{"a": "b"}]), ValueError, "label_selector is "),
    (lambda: ScalingConfig(num_worker=2), TypeError, "Did you mean 'num_workers'"),  # type: ignore[call-arg]
    (lambda: FailureConfig(fail_fast=True), DeprecationWarning, "Pass max_failures=0"),
    (lambda: FailureConfig(recovery="no"), ValueError, "'restart' or 'in_place', but is 'no'"),
    (
        lambda: FailureConfig(recovery="in_place", relax_collectives_on_preemption=True),
        ValueError,
        "relax_collectives_on_preemption must be False",
    ),
    (lambda: FailureConfig(max_failures=-2), ValueError, "-1 for no limit, but is -2"),
    (lambda: LoggingConfig("loud"), ValueError, "log_level must be one of .*, but is 'loud'"),
    (lambda: CheckpointConfig(num_to_keep=0), ValueError, "num_to_keep is 0, but the latest"),
    (lambda: TorchConfig(init_method="file"), ValueError, "'env' or 'tcp', but is 'file'"),
    (lambda: RunConfig(".."), ValueError, "RunConfig.name must be the name of a folder"),
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
    (lambda: TorchTrainer.restore("path"), DeprecationWarning, "the same RunConfig.name"),
    (lambda: TorchTrainer(lambda a, b: None), TypeError, r"but is <lambda>\(a, b\)"),
    (lambda: TorchTrainer(sleep), TypeError, "sleep is an async function: to call it does not"),
    (lambda: TorchTrainer(print, datasets={"a": 1}), TypeError, "Pass a Spark DataFrame, or"),
]


@pytest.mark.parametrize(("create", "kind", "message"), BAD)
def test_bad_input_raises_before_anything_starts(
    create: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        create()
    assert re.search(message, str(caught.value)), str(caught.value)


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


def test_values_that_change_nothing_are_accepted() -> None:
    ScalingConfig(resources_per_worker={"CPU": 1}, placement_strategy="SPREAD")
    ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 1}, accelerator_type="A10G")
    RunConfig("a", "b", None, FailureConfig(), CheckpointConfig(), [], {}, verbose=0)
    TorchTrainer(print, datasets={}, dataset_config=DataConfig(), metadata={})
