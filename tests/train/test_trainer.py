"""TorchTrainer: its result, its checks of the input, and training that resumes."""

from __future__ import annotations

import json
import pickle
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.fs as pafs
import pytest
import torch
import torch.distributed as dist
from support import plain, training
from support.training import BATCH, EPOCHS, SAMPLES, Fault, curve, samples, trainer
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from distributor import RunTimeout, TorchDistributor, train
from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from distributor.train.runtime.resumable_loader import ShardSampler, prepare
from distributor.train.torch import (
    TorchConfig,
    TorchTrainer,
    get_device,
    prepare_data_loader,
    prepare_model,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(training)
cloudpickle.register_pickle_by_value(plain)
TIMEOUT = {"timeout": 120, "show_output": "none"}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_an_epoch_resumes_on_other_ranks(tmp_path: Path, workers: int) -> None:
    stopped = trainer(tmp_path, workers=4, stop_at=2).fit()
    assert stopped.return_value == [2]

    resumed = trainer(tmp_path, workers=workers).fit()

    assert {each.world_size for each in resumed.reports} == {4, workers}
    for epoch in range(EPOCHS):
        assert sorted(samples(resumed, epoch)) == list(range(SAMPLES)), epoch
    order = samples(trainer(tmp_path, workers=1, name="alone").fit(), 0)
    trained = 2 * 4 * BATCH
    assert set(samples(resumed, 0)[:trained]) == set(order[:trained]), (
        "the order is the same for all world sizes"
    )


@pytest.mark.spark
def test_a_killed_training_resumes_on_the_cluster(spark: Any, tmp_path: Path) -> None:
    fault = Fault("step", 6, rank=0, marker=str(tmp_path / "marker"))
    killed = trainer(tmp_path, local_mode=False, failures=1, fault=fault).fit()

    assert curve(killed) == curve(trainer(tmp_path, "undisturbed").fit())
    assert [each.attempt for each in killed.reports] == 4 * [0] + 12 * [1]
    assert killed.metrics_dataframe["loss"].tolist() == curve(killed)


def test_best_checkpoints_are_kept(tmp_path: Path) -> None:
    def loop() -> None:
        for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.6]):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(step))
                rank = train.get_context().get_world_rank()
                checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                train.report({"accuracy": accuracy}, checkpoint=checkpoint)
        train.report({"accuracy": 0.1}, checkpoint=None)

    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy")
    run = RunConfig(storage_path=tmp_path, checkpoint_config=config, settings=TIMEOUT)
    result = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()

    kept = [metrics["accuracy"] for _, metrics in result.best_checkpoints]
    assert kept == [0.9, 0.7, 0.6], "the best two, and the latest"
    best = result.get_best_checkpoint("accuracy")
    assert best
    assert best.path.endswith("checkpoint_000001")
    assert result.checkpoint
    assert result.checkpoint.path.endswith("checkpoint_000003")
    assert result.metrics == {"accuracy": 0.1}
    lines = Path(result.path, "reports.jsonl").read_text().splitlines()
    assert [json.loads(line)["metrics"]["accuracy"] for line in lines] == [0.5, 0.9, 0.7, 0.6, 0.1]


def test_training_continues_if_the_report_log_cannot_be_written(tmp_path: Path) -> None:
    def loop() -> None:
        for step in range(2):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(step))
                train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))

    files = plain.plain(pafs.LocalFileSystem())
    run = RunConfig(storage_path=str(tmp_path), storage_filesystem=files, settings=TIMEOUT)
    result = TorchTrainer(loop, run_config=run).fit()

    assert len(Path(result.path, "reports.jsonl").read_text().splitlines()) == 1, (
        "only the first report"
    )
    assert [report.metrics for report in result.reports] == [{"step": 0}, {"step": 1}]


def test_a_checkpoint_without_the_score_ranks_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def loop() -> None:
        for metrics in ({"val": {"loss": 2.0}}, {"loss": 1.0}, {"loss": 0.5}, {"val/loss": 3.0}):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "weights").write_text("1, 2, 3")
                train.report(metrics, checkpoint=Checkpoint.from_directory(folder))

    config = CheckpointConfig(
        num_to_keep=1, checkpoint_score_attribute="val/loss", checkpoint_score_order="min"
    )
    run = RunConfig(storage_path=tmp_path, checkpoint_config=config, settings={"timeout": 120})
    result = TorchTrainer(loop, run_config=run).fit()
    assert [metrics for _, metrics in result.best_checkpoints] == [
        {"val": {"loss": 2.0}},
        {"val/loss": 3.0},
    ]
    warning = "checkpoint_score_attribute is 'val/loss', but the metrics .* no such number"
    assert len(re.findall(warning, capfd.readouterr().out)) == 1


def test_failed_ranks_raise_their_exceptions_inside_rays(tmp_path: Path) -> None:
    def loop() -> None:
        rank = train.get_context().get_world_rank()
        raise KeyError(f"of rank {rank}")

    run = RunConfig(storage_path=tmp_path, settings=TIMEOUT)
    trainer = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run)
    with pytest.raises(train.TrainingFailedError, match="KeyError: 'of rank") as failed:
        trainer.fit()
    error = failed.value
    assert isinstance(error, train.WorkerGroupError)
    cause = next(iter(error.worker_failures.values()))
    assert error.__cause__ is cause
    assert isinstance(cause, KeyError)
    assert "of rank" in str(pickle.loads(pickle.dumps(error)).worker_failures)


def test_a_deadline_is_an_error_of_the_run(tmp_path: Path) -> None:
    run = RunConfig(storage_path=tmp_path, settings={"timeout": 2})
    with pytest.raises(train.ControllerError, match="timeout") as failed:
        TorchTrainer(lambda: time.sleep(100), run_config=run).fit()
    assert isinstance(failed.value.__cause__, RunTimeout)


def test_the_training_function_has_a_process_group_and_a_device(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        context = train.get_context()
        storage = context.get_storage()
        assert config == {}, "the default is an empty configuration"
        sizes = context.get_world_size(), dist.get_world_size()
        return str(get_device()), sizes, context.get_experiment_name(), storage.path

    run = RunConfig(name="mine", storage_path=tmp_path, settings=TIMEOUT)
    result = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()

    assert result.return_value == ("cpu", (2, 2), "mine", str(tmp_path / "mine"))
    assert (result.metrics, result.checkpoint, result.error) == (None, None, None)
    assert result.path == str(tmp_path / "mine")


def test_a_training_resumes_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    def loop() -> Any:
        found = train.get_checkpoint()
        assert found is not None
        with found.as_directory() as folder:
            return Path(folder, "weights").read_text()

    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "weights").write_text("1, 2, 3")
    run = RunConfig(storage_path=tmp_path / "new", settings=TIMEOUT)
    checkpoint = Checkpoint.from_directory(tmp_path / "old")
    assert TorchTrainer(
        loop, run_config=run, resume_from_checkpoint=checkpoint
    ).fit().return_value == ("1, 2, 3")
    (tmp_path / "old" / "weights").unlink()
    (tmp_path / "old").rmdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        TorchTrainer(loop, run_config=run, resume_from_checkpoint=checkpoint)


def test_prepare_model_works_in_a_run_without_a_trainer(tmp_path: Path) -> None:
    def loop() -> Any:
        model = prepare_model(torch.nn.Linear(2, 2))
        sharded = prepare_model(torch.nn.Linear(2, 2), parallel_strategy="fsdp")
        plain = prepare_model(torch.nn.Linear(2, 2), parallel_strategy=None)
        out = [each(torch.ones(1, 2)).shape for each in (model, sharded, plain)]
        assert out == [(1, 2)] * 3
        return [type(each).__name__ for each in (model, sharded, plain)]

    kinds = TorchDistributor(2, use_gpu=False, timeout=120, show_output="none").run(loop)
    assert kinds == ["DistributedDataParallel", "FullyShardedDataParallel", "Linear"]


async def sleep() -> None: ...


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: ScalingConfig(num_workers=0), ValueError, "num_workers has to be .*, but is 0"),
    (lambda: ScalingConfig(use_gpu="True"), TypeError, "use_gpu must be True or False, but is"),
    (lambda: ScalingConfig(local_mode=None), TypeError, "local_mode must be True or False, but"),
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
    (lambda: ScalingConfig(label_selector=[{"a": "b"}]), ValueError, "label_selector is "),
    (lambda: FailureConfig(fail_fast=True), DeprecationWarning, "Pass max_failures=0"),
    (lambda: FailureConfig(max_preemption_failures=2), ValueError, "max_preemption_failures is 2"),
    (lambda: CheckpointConfig(num_to_keep=0), ValueError, "num_to_keep is 0, but the latest"),
    (lambda: CheckpointConfig(checkpoint_score_order="up"), ValueError, "'max' or 'min'"),
    (lambda: FailureConfig(max_failures=-2), ValueError, "-1 for no limit, but is -2"),
    (lambda: RunConfig(stop=3), ValueError, "RunConfig: stop is 3"),
    (lambda: RunConfig(failure_config=3), TypeError, "failure_config must be a FailureConfig"),
    (lambda: TorchConfig(init_method="file"), ValueError, "'env' or 'tcp', but is 'file'"),
    (lambda: TorchTrainer(lambda a, b: None), TypeError, r"but is <lambda>\(a, b\)"),
    (lambda: TorchTrainer(sleep), TypeError, "sleep is an async function: to call it does not"),
    (lambda: TorchTrainer(3), TypeError, "train_loop_per_worker must be a function, but is 3"),
    (lambda: TorchTrainer(print, datasets={"a": 1}), ValueError, "datasets is not supported"),
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
    (lambda: TorchTrainer(print, train_loop_config=5), TypeError, "must be a Mapping, but is 5"),
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
        r"RunConfig.settings has \['timeot'\]; it takes env, ",
    ),
    (lambda: TorchConfig(timeout_s="x"), ValueError, "positive number of seconds, but is x"),
    (lambda: TorchConfig(backend=3), TypeError, "but is 3"),
    (
        lambda: TorchTrainer(print, run_config=RunConfig(settings={"name": "x"})),
        ValueError,
        r"RunConfig.settings has \['name'\]",
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
    FailureConfig(3, False, controller_failure_limit=-1)
    CheckpointConfig(2, "loss", "min", checkpoint_at_end=False)
    RunConfig("a", "b", None, FailureConfig(), CheckpointConfig(), [], {}, verbose=0)


def test_a_configuration_can_change_until_the_training_starts(tmp_path: Path) -> None:
    run, scaling = RunConfig(), ScalingConfig()
    assert run.name != RunConfig().name
    assert run.storage_path == str(Path("~/distributor_results").expanduser())
    run.storage_path, run.settings = tmp_path, TIMEOUT
    trainer = TorchTrainer(lambda: None, run_config=run, scaling_config=scaling)
    trainer.run_config.name, scaling.num_workers = "later", 2
    assert trainer.fit().path == str(tmp_path / "later")
    scaling.num_workers = -1
    with pytest.raises(ValueError, match="num_workers has to be a positive integer"):
        trainer.fit()


@pytest.mark.parametrize(("create", "kind", "message"), BAD)
def test_bad_input_raises_before_anything_starts(
    create: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        create()
    assert re.search(message, str(caught.value)), str(caught.value)


def test_prepare_data_loader_refuses_to_discard_a_custom_sampler() -> None:
    data = TensorDataset(torch.arange(4))
    weighted = DataLoader(data, sampler=WeightedRandomSampler([1.0] * 4, 4))
    with pytest.raises(ValueError, match="discard its WeightedRandomSampler"):
        prepare_data_loader(weighted)
    assert len(prepare_data_loader(weighted, add_dist_sampler=False)) == 4


def test_tensors_in_batches_of_any_type_are_moved_to_the_device() -> None:
    device = torch.device("meta")
    batches = [{"x": torch.ones(2), "names": ["a"]}, (torch.ones(1), 3)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    named, pair = prepare(loader, shard=True, device=device, pin_memory=False)

    assert (named["x"].device, named["names"]) == (device, ["a"])
    assert pair[0].device == device
    assert pair[1] == 3


@pytest.mark.parametrize("length", [1, 7, 12])
def test_all_ranks_get_the_same_number_of_samples(length: int) -> None:
    for size in (1, 2, 5):
        for start in range(length + 1):
            shares = [
                ShardSampler(length, shuffle=True, rank=rank, size=size) for rank in range(size)
            ]
            for share in shares:
                share.start = start
            samples_of = [list(share) for share in shares]
            assert len({len(each) for each in samples_of}) == 1
            assert len({sample for each in samples_of for sample in each}) == length - start
            assert [len(each) for each in samples_of] == [-(-(length - start) // size)] * size
