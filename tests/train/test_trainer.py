"""TorchTrainer: what it gives, and what it takes up again after a rank was killed."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.fs as pafs
import pytest
import torch
import torch.distributed as dist
from support import plain, training
from support.training import BATCH, EPOCHS, SAMPLES, Fate, curve, samples, trainer
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from distributor import DistributorError, TorchDistributor, train
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


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_epoch_goes_on_with_other_ranks(tmp_path: Path, workers: int) -> None:
    begun = trainer(tmp_path, workers=4, stop_at=2).fit()
    assert begun.return_value == [2]

    ended = trainer(tmp_path, workers=workers).fit()

    assert {each.world_size for each in ended.reports} == {4, workers}
    for epoch in range(EPOCHS):
        assert sorted(samples(ended, epoch)) == list(range(SAMPLES)), epoch
    order = samples(trainer(tmp_path, workers=1, name="alone").fit(), 0)
    trained = 2 * 4 * BATCH
    assert set(samples(ended, 0)[:trained]) == set(order[:trained]), "one order for all worlds"


@pytest.mark.spark
def test_a_killed_training_goes_on_on_the_cluster(spark: Any, tmp_path: Path) -> None:
    fate = Fate("step", 6, rank=0, marker=str(tmp_path / "marker"))
    killed = trainer(tmp_path, local_mode=False, failures=1, fate=fate).fit()

    assert curve(killed) == curve(trainer(tmp_path, "here").fit())
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

    kept = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy")
    run = RunConfig(storage_path=tmp_path, checkpoint_config=kept, settings=TIMEOUT)
    result = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()

    kept_ones = [metrics["accuracy"] for _, metrics in result.best_checkpoints]
    assert kept_ones == [0.9, 0.7, 0.6], "the best two, and the latest"
    best = result.get_best_checkpoint("accuracy")
    assert best
    assert best.path.endswith("checkpoint_000001")
    assert result.checkpoint
    assert result.checkpoint.path.endswith("checkpoint_000003")
    assert result.metrics == {"accuracy": 0.1}
    lines = Path(result.path, "reports.jsonl").read_text().splitlines()
    assert [json.loads(line)["metrics"]["accuracy"] for line in lines] == [0.5, 0.9, 0.7, 0.6, 0.1]


def test_a_record_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    def loop() -> None:
        for step in range(2):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(step))
                train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))

    files = plain.plain(pafs.LocalFileSystem())
    run = RunConfig(storage_path=str(tmp_path), storage_filesystem=files, settings=TIMEOUT)
    result = TorchTrainer(loop, run_config=run).fit()

    assert len(Path(result.path, "reports.jsonl").read_text().splitlines()) == 1, "the first alone"
    assert [report.metrics for report in result.reports] == [{"step": 0}, {"step": 1}]


def test_a_score_that_is_not_reported_is_told(tmp_path: Path) -> None:
    def loop() -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "weights").write_text("1, 2, 3")
            train.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder))

    kept = CheckpointConfig(checkpoint_score_attribute="accuracy")
    run = RunConfig(storage_path=tmp_path, checkpoint_config=kept, settings=TIMEOUT)
    with pytest.raises(DistributorError, match=r"is 'accuracy', but the metrics .*'loss'"):
        TorchTrainer(loop, run_config=run).fit()


def test_the_group_is_there_and_the_device(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        context = train.get_context()
        storage = context.get_storage()
        assert config == {}, "what nobody gave is empty"
        sizes = context.get_world_size(), dist.get_world_size()
        return str(get_device()), sizes, context.get_experiment_name(), storage.path

    run = RunConfig(name="mine", storage_path=tmp_path, settings=TIMEOUT)
    result = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()

    assert result.return_value == ("cpu", (2, 2), "mine", str(tmp_path / "mine"))
    assert (result.metrics, result.checkpoint, result.error) == (None, None, None)
    assert result.path == str(tmp_path / "mine")


def test_a_training_begins_where_another_ended(tmp_path: Path) -> None:
    def loop() -> Any:
        found = train.get_checkpoint()
        assert found is not None
        with found.as_directory() as folder:
            return Path(folder, "weights").read_text()

    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "weights").write_text("1, 2, 3")
    run = RunConfig(storage_path=tmp_path / "new", settings=TIMEOUT)
    begin = Checkpoint.from_directory(tmp_path / "old")
    assert TorchTrainer(loop, run_config=run, resume_from_checkpoint=begin).fit().return_value == (
        "1, 2, 3"
    )
    (tmp_path / "old" / "weights").unlink()
    (tmp_path / "old").rmdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        TorchTrainer(loop, run_config=run, resume_from_checkpoint=begin)


def test_models_are_prepared_in_other_runs_too(tmp_path: Path) -> None:
    def loop() -> Any:
        model = prepare_model(torch.nn.Linear(2, 2))
        sharded = prepare_model(torch.nn.Linear(2, 2), parallel_strategy="fsdp")
        plain = prepare_model(torch.nn.Linear(2, 2), parallel_strategy=None)
        out = [each(torch.ones(1, 2)).shape for each in (model, sharded, plain)]
        assert out == [(1, 2)] * 3
        return [type(each).__name__ for each in (model, sharded, plain)]

    kinds = TorchDistributor(2, use_gpu=False, timeout=120, show_output="none").run(loop)
    assert kinds == ["DistributedDataParallel", "FullyShardedDataParallel", "Linear"]


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: ScalingConfig(num_workers=0), ValueError, "positive integer, but is 0"),
    (lambda: ScalingConfig(num_workers=(3, 2)), ValueError, "minimum is greater than the maximum"),
    (
        lambda: ScalingConfig(resources_per_worker={"CPU": 2}),
        ValueError,
        r"ScalingConfig: resources_per_worker is .* not supported on Spark.*spark\.task\.cpus",
    ),
    (lambda: CheckpointConfig(num_to_keep=0), ValueError, "num_to_keep is 0, but the latest"),
    (lambda: CheckpointConfig(checkpoint_score_order="up"), ValueError, "'max' or 'min'"),
    (lambda: FailureConfig(max_failures=-2), ValueError, "-1 for no limit, but is -2"),
    (lambda: RunConfig(stop=3), ValueError, "RunConfig: stop is 3"),
    (lambda: RunConfig(failure_config=3), TypeError, "failure_config must be a FailureConfig"),
    (lambda: TorchConfig(init_method="tcp"), ValueError, "init_method must be 'env', but is 'tcp'"),
    (lambda: TorchTrainer(lambda a, b: None), TypeError, r"but is <lambda>\(a, b\)"),
    (lambda: TorchTrainer(3), TypeError, "train_loop_per_worker must be a function, but is 3"),
    (lambda: TorchTrainer(print, datasets={}), ValueError, "datasets is not supported"),
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
        lambda: TorchTrainer(print, run_config=RunConfig("..")),
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


@pytest.mark.parametrize(("make", "kind", "words"), BAD)
def test_bad_input_is_told_before_anything_starts(
    make: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert re.search(words, str(caught.value)), str(caught.value)


def test_a_sampler_of_ones_own_is_not_lost() -> None:
    data = TensorDataset(torch.arange(4))
    weighted = DataLoader(data, sampler=WeightedRandomSampler([1.0] * 4, 4))
    with pytest.raises(ValueError, match="discard its WeightedRandomSampler"):
        prepare_data_loader(weighted)
    assert len(prepare_data_loader(weighted, add_dist_sampler=False)) == 4


def test_batches_of_any_kind_are_moved() -> None:
    device = torch.device("meta")
    told = [{"x": torch.ones(2), "names": ["a"]}, (torch.ones(1), 3)]
    loader = DataLoader(told, batch_size=None)  # type: ignore[arg-type]

    named, pair = prepare(loader, shard=True, device=device, pin_memory=False)

    assert (named["x"].device, named["names"]) == (device, ["a"])
    assert pair[0].device == device
    assert pair[1] == 3


@pytest.mark.parametrize("length", [1, 7, 12])
def test_all_ranks_get_as_many_samples(length: int) -> None:
    for size in (1, 2, 5):
        for start in range(length + 1):
            shares = [
                ShardSampler(length, shuffle=True, rank=rank, size=size) for rank in range(size)
            ]
            for share in shares:
                share.start = start
            given = [list(share) for share in shares]
            assert len({len(each) for each in given}) == 1
            assert len({sample for each in given for sample in each}) == length - start
            assert [len(each) for each in given] == [-(-(length - start) // size)] * size
