"""The configuration of a `TorchTrainer`: what is accepted and refused, and what it means."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from support import plain
from support.training import here

from distributor import Listener, RunStalled
from distributor.screen.one_time_warnings import warn_once
from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    ControllerError,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    Result,
    RunConfig,
    ScalingConfig,
    SyncConfig,
    report,
)
from distributor.train.torch import TorchConfig, TorchTrainer


async def sleep() -> None: ...


def s3() -> Any:
    return pafs.S3FileSystem(anonymous=True, region="us-east-1")


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: ScalingConfig(num_workers=-1), ValueError, "num_workers has to be .*, but is -1"),
    (lambda: ScalingConfig(num_workers="2"), ValueError, "num_workers has to be .*, but is '2'"),
    (lambda: ScalingConfig(use_gpu="True"), TypeError, "use_gpu must be True or False, but is"),
    (lambda: ScalingConfig(local_mode="yes"), TypeError, "local_mode must be True or False, but"),
    (lambda: ScalingConfig(num_workers=(3, 2)), ValueError, "minimum is greater than the maximum"),
    (
        lambda: ScalingConfig(resources_per_worker={"CPU": 2}),
        ValueError,
        r"ScalingConfig: resources_per_worker is .* not supported on Spark.*spark\.task\.cpus",
    ),
    (
        lambda: ScalingConfig(resources_per_worker={"GPU": 1}),
        ValueError,
        "resources_per_worker has 1 GPUs, but use_gpu is False",
    ),
    (
        lambda: ScalingConfig(placement_strategy="STRICT_SPREAD"),
        DeprecationWarning,
        "placement_strategy is 'STRICT_SPREAD', which is not supported on Spark",
    ),
    (
        lambda: ScalingConfig(placement_strategy="STRICT_PACK"),
        DeprecationWarning,
        "placement_strategy is 'STRICT_PACK', which",
    ),
    (lambda: ScalingConfig(placement_strategy="pack"), ValueError, "one of PACK, SPREAD, STRICT"),
    (lambda: ScalingConfig(accelerator_type="H100"), ValueError, "'H100', but use_gpu is False"),
    (
        lambda: ScalingConfig(use_gpu=True, accelerator_type="A100-80G"),
        ValueError,
        "accelerator_type must be one of .*, but is 'A100-80G'",
    ),
    (lambda: ScalingConfig(resources_per_worker={"TPU": 1}), ValueError, "has TPUs, but use_tpu"),
    (
        lambda: ScalingConfig(elastic_resize_monitor_interval_s=-1),
        ValueError,
        "elastic_resize_monitor_interval_s is negative",
    ),
    (lambda: ScalingConfig(label_selector=[{"a": "b"}]), ValueError, "label_selector is "),
    (lambda: FailureConfig(fail_fast=True), DeprecationWarning, "Pass max_failures=0"),
    (lambda: FailureConfig(max_preemption_failures=-2), ValueError, "max_preemption_failures must"),
    (lambda: FailureConfig(controller_failure_limit=2), ValueError, "controller_failure_limit is"),
    (lambda: FailureConfig(preemption_grace_s=-1), ValueError, "preemption_grace_s is negative"),
    (lambda: FailureConfig(preemption_grace_s="1"), TypeError, "preemption_grace_s must be a num"),
    (
        lambda: FailureConfig(relax_collectives_on_preemption="no"),
        TypeError,
        "relax_collectives_on_preemption must be True or False",
    ),
    (lambda: LoggingConfig("loud"), ValueError, "log_level must be one of .*, but is 'loud'"),
    (lambda: LoggingConfig(10), ValueError, "log_level must be one of .*, but is 10"),
    (lambda: DataConfig("train"), TypeError, "datasets_to_split must be 'all' or a list"),
    (lambda: RunConfig(sync_config=SyncConfig()), DeprecationWarning, "RunConfig: sync_config is"),
    (lambda: RunConfig(checkpoint_config={"num_to_keep": 1}), ValueError, "be a CheckpointConfig"),
    (
        lambda: RunConfig(worker_runtime_env={"conda": "env"}),
        ValueError,
        r"worker_runtime_env\['conda'\] is 'env', which is not supported.*It takes env_vars, pip",
    ),
    (
        lambda: TorchTrainer(
            print,
            run_config=RunConfig(
                worker_runtime_env={"pip": ["a"]}, settings={"environment": ["b"]}
            ),
        ),
        ValueError,
        r"worker_runtime_env and RunConfig.settings both determine \['environment'\]",
    ),
    (lambda: TorchTrainer(print, metadata={"a": 1}), DeprecationWarning, "metadata is not support"),
    (lambda: TorchTrainer.restore("path"), DeprecationWarning, "the same RunConfig.name"),
    (lambda: TorchTrainer.can_restore("path"), DeprecationWarning, "the same RunConfig.name"),
    (lambda: Result({}, None, None, "/x").config, DeprecationWarning, "Result.config belongs to"),
    (lambda: CheckpointConfig(num_to_keep=0), ValueError, "num_to_keep is 0, but the latest"),
    (lambda: CheckpointConfig(checkpoint_score_order="up"), ValueError, "'max' or 'min'"),
    (lambda: FailureConfig(max_failures=-2), ValueError, "-1 for no limit, but is -2"),
    (lambda: RunConfig(stop=3), ValueError, "RunConfig: stop is 3"),
    (lambda: RunConfig(failure_config=3), TypeError, "failure_config must be a FailureConfig"),
    (lambda: TorchConfig(init_method="file"), ValueError, "'env' or 'tcp', but is 'file'"),
    (lambda: TorchTrainer(lambda a, b: None), TypeError, r"but is <lambda>\(a, b\)"),
    (lambda: TorchTrainer(sleep), TypeError, "sleep is an async function: to call it does not"),
    (lambda: TorchTrainer(3), TypeError, "train_loop_per_worker must be a function, but is 3"),
    (lambda: TorchTrainer(print, datasets={"a": 1}), TypeError, "Pass a Spark DataFrame, or"),
    (
        lambda: TorchTrainer(print, run_config=RunConfig(storage_path="nobody://knows")),
        ValueError,
        "No file system is known for nobody://knows",
    ),
    (
        lambda: TorchTrainer(print, scaling_config=4),
        TypeError,
        "scaling_config must be a ScalingConfig, but is 4",
    ),
    (lambda: TorchTrainer(print, run_config={}), TypeError, "run_config must be a RunConfig"),
    (
        lambda: TorchTrainer(print, torch_config="nccl"),
        TypeError,
        "must be a TorchConfig, but is",
    ),
    (
        lambda: TorchTrainer(print, resume_from_checkpoint="runs/x"),
        TypeError,
        r"such as Checkpoint\(path\), but is 'runs/x'",
    ),
    (
        lambda: RunConfig(".."),
        ValueError,
        "RunConfig.name must be the name of a folder, but is '..'",
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
    (lambda: ScalingConfig(resources_per_worker="GPU"), ValueError, "to amounts.* but is 'GPU'"),
    (
        lambda: ScalingConfig(elastic_resize_monitor_interval_s="x"),
        ValueError,
        "interval_s must be a number of seconds, but is 'x'",
    ),
    (lambda: ScalingConfig(label_selector=3), ValueError, "label_selector is 3"),
    (
        lambda: CheckpointConfig(checkpoint_score_attribute=3),
        TypeError,
        "must be the name of a metric, but is 3",
    ),
    (lambda: RunConfig(storage_path=3), TypeError, "storage_path must be a path or a URI"),
    (lambda: RunConfig(settings=None), ValueError, "settings must be a Mapping, but is None"),
    (lambda: RunConfig(settings={"env": 3}), TypeError, r"settings\['env'\] must map strings"),
    (
        lambda: RunConfig(worker_runtime_env={"env_vars": ["A=1"]}),
        TypeError,
        r"worker_runtime_env\['env_vars'\] must map strings to strings, but is \['A=1'\]",
    ),
    (
        lambda: RunConfig(worker_runtime_env={"py_modules": "helpers"}),
        ValueError,
        r"worker_runtime_env\['py_modules'\] must be a list .*, but is 'helpers'",
    ),
    (
        lambda: TorchTrainer(print, run_config=RunConfig(settings={"listeners": Listener})),
        TypeError,
        "listeners must be a list of Listener objects, but is <class",
    ),
    (lambda: TorchConfig(timeout_s="x"), ValueError, "positive number of seconds, but is x"),
    (lambda: TorchConfig(backend=3), TypeError, "but is 3"),
    (
        lambda: TorchTrainer(
            print, scaling_config=here(), run_config=RunConfig(storage_filesystem=s3())
        ),
        ValueError,
        "has a storage_filesystem, but no storage_path, and /.* cannot be read in it: Path cannot",
    ),
    (
        lambda: TorchTrainer(print, run_config=RunConfig(settings={"name": "x"})),
        ValueError,
        r"RunConfig.settings has \['name'\]",
    ),
    (
        lambda: ScalingConfig(num_worker=2),  # type: ignore[call-arg]
        TypeError,
        r"^ScalingConfig\(\) got an unexpected .* 'num_worker'. Did you mean 'num_workers'\?$",
    ),
    (
        lambda: ScalingConfig(num_gpus=2),  # type: ignore[call-arg]
        TypeError,
        "Did you mean 'num_workers'",
    ),
    (
        lambda: RunConfig(storage="runs"),  # type: ignore[call-arg]
        TypeError,
        "Did you mean 'storage_path'",
    ),
    (
        lambda: CheckpointConfig(num_keep=1),  # type: ignore[call-arg]
        TypeError,
        "Did you mean 'num_to_keep'",
    ),
    (
        lambda: FailureConfig(max_failure=1),  # type: ignore[call-arg]
        TypeError,
        "Did you mean 'max_failures'",
    ),
    (
        lambda: TorchConfig(timeout=1),  # type: ignore[call-arg]
        TypeError,
        "Did you mean 'timeout_s'",
    ),
    (
        lambda: TorchTrainer(print, scaling=None),  # type: ignore[call-arg]
        TypeError,
        "Did you mean 'scaling_config'",
    ),
]


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


def test_an_order_of_checkpoints_without_a_metric_has_no_effect(
    warned: Callable[[], list[str]],
) -> None:
    warn_once.cache_clear()
    CheckpointConfig(checkpoint_score_order="min")
    CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min")
    assert warned() == [
        "checkpoint_score_order has no effect: without checkpoint_score_attribute, checkpoints are "
        "ranked by their age."
    ]


def test_the_resources_of_all_ranks() -> None:
    assert ScalingConfig().total_resources == {"CPU": 1}
    assert ScalingConfig(use_gpu=True).total_resources == {"GPU": 1}
    scaling = ScalingConfig(
        num_workers=(2, 3), use_gpu=True, resources_per_worker={"CPU": 1, "memory": 0}
    )
    assert scaling.total_resources == {"CPU": 3, "GPU": 3}
    assert (scaling.num_cpus_per_worker, scaling.num_gpus_per_worker) == (1, 1)
    assert (scaling.num_tpus_per_worker, scaling.additional_resources_per_worker) == (0, {})
    assert (scaling.min_workers, scaling.max_workers, scaling.elasticity_enabled) == (2, 3, True)


def test_the_default_path_is_in_the_file_system_that_was_passed(tmp_path: Path) -> None:
    def loop() -> None:
        report({"loss": 1.0}, Checkpoint.from_directory(tmp_path / "saved"))

    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "model.pt").write_text("x")
    inner = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    run = RunConfig("mine", storage_filesystem=inner)
    result = TorchTrainer(loop, scaling_config=here(), run_config=run).fit()
    assert f"/{result.path}" == os.path.expanduser("~/distributor_results/mine")
    assert (tmp_path / result.path / "checkpoint_000000" / "model.pt").exists()
    assert RunConfig(storage_path=tmp_path).storage_path == str(tmp_path)


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


def test_a_trainer_shows_its_configuration() -> None:
    scaling, run, torch_config = here(), RunConfig(), TorchConfig(backend="gloo")
    trainer = TorchTrainer(print, scaling_config=scaling, run_config=run, torch_config=torch_config)
    context = trainer.train_run_context
    assert (context.run_config, context.scaling_config) == (run, scaling)
    assert trainer.backend_config is context.backend_config is torch_config
    assert trainer.data_config is context.dataset_config
    assert (trainer.datasets, trainer.train_loop_config) == ({}, None)
    assert len(context.run_id) == 32
    assert not trainer.running_in_local_mode
    assert torch_config.to_dict() == {"backend": "gloo", "init_method": "env", "timeout_s": 1800}


def test_what_a_result_without_checkpoints_lacks(tmp_path: Path) -> None:
    result = Result({"a": 1}, None, None, "/x")
    assert "metrics={'a': 1}, checkpoint=None, error=None, path='/x'" in repr(result)
    assert isinstance(result.filesystem, pafs.LocalFileSystem)
    with pytest.raises(RuntimeError, match="no checkpoint"):
        result.get_best_checkpoint("a", "max")
    first, second = Checkpoint("/bucket/ckpt0"), Checkpoint("/bucket/ckpt1")
    result.best_checkpoints = [(first, {"val": {"loss": 1.0}}), (second, {"val": {"loss": 2.0}})]
    assert result.get_best_checkpoint("val/loss", "min") is first
    assert result.get_best_checkpoint("val/loss", "max") is second
    with pytest.raises(RuntimeError, match="number 'loss'; the latest metrics are "):
        result.get_best_checkpoint("loss", "max")
    with pytest.raises(ValueError, match="mode must be 'max' or 'min', but is 'most'"):
        result.get_best_checkpoint("val/loss", "most")  # type: ignore[arg-type]
    assert "Checkpoint(filesystem=local, path=/bucket/ckpt0)" in repr(result)
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RuntimeError, match=f"There is no training run in {folder}"):
            Result.from_path(folder)


@pytest.mark.parametrize(("create", "kind", "message"), BAD)
def test_bad_input_raises_before_anything_starts(
    create: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        create()
    assert re.search(message, str(caught.value)), str(caught.value)


def test_options_for_preemption_are_accepted_with_a_warning(
    warned: Callable[[], list[str]],
) -> None:
    warn_once.cache_clear()
    FailureConfig(relax_collectives_on_preemption=True, preemption_grace_s=30.0)
    assert [text.partition(" has no effect")[0] for text in warned()] == [
        "relax_collectives_on_preemption",
        "preemption_grace_s",
    ]


def test_the_cause_of_a_hang_has_the_stacks(tmp_path: Path) -> None:
    trainer = TorchTrainer(
        lambda: threading.Event().wait(),
        scaling_config=ScalingConfig(num_workers=2, local_mode=True),
        run_config=RunConfig(storage_path=str(tmp_path), settings={"stall_timeout": 3}),
    )
    with pytest.raises(ControllerError) as caught:
        trainer.fit()
    assert isinstance(caught.value.__cause__, RunStalled)
    assert caught.value.__cause__.stacks.keys() == {0, 1}
