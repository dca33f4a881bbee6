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
import pytest
import torch
import torch.distributed as dist
from support import plain, training
from support.training import BATCH, EPOCHS, SAMPLES, here, samples, trainer
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from distributor import RunTimeout, TorchDistributor, train
from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    RunConfig,
)
from distributor.train.torch import (
    TorchTrainer,
    get_device,
    prepare_data_loader,
    prepare_model,
)
from distributor.train.torch.loaders import ShardSampler, prepare

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
def test_the_ranks_run_on_the_active_spark_session(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunConfig(storage_path=tmp_path, settings=TIMEOUT)
    trainer = TorchTrainer(lambda: train.report({"a": 1}), run_config=run)
    assert trainer.fit().metrics == {"a": 1}
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == (
        "TorchTrainer runs its ranks on executors of the active Spark session, because there is "
        "one; ScalingConfig(local_mode=True) runs them on this machine."
    )
    assert "Started distributed training with 1 executor process" in lines


NO_SESSION = """
import sys, tempfile
from pathlib import Path
from distributor import train
from distributor.train.torch import TorchTrainer

def save():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "weights").write_text("1, 2, 3")
        train.report({"a": 1}, checkpoint=train.Checkpoint.from_directory(folder))

for _ in range(2):
    TorchTrainer(save, run_config=train.RunConfig("mine", sys.argv[1])).fit()
"""


def test_the_ranks_run_here_without_a_session_and_a_name_continues(
    run_driver: Any, tmp_path: Path
) -> None:
    lines = run_driver(NO_SESSION, str(tmp_path)).stderr.splitlines()
    first = "TorchTrainer runs its ranks on this machine, because there is no active Spark session."
    begins = [number for number, line in enumerate(lines) if line == first]
    assert (len(begins), begins[0]) == (2, 0)
    resuming = [number for number, line in enumerate(lines) if line.startswith("Resuming")]
    assert resuming == [begins[1] + 1]
    assert lines[resuming[0]] == (
        f"Resuming mine from checkpoint_000000 in {tmp_path}. Another name starts anew."
    )


def test_best_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    result = TorchTrainer(loop, scaling_config=here(2), run_config=run).fit()

    assert result.best_checkpoints is not None
    assert [metrics["accuracy"] for _, metrics in result.best_checkpoints] == [0.7, 0.9]
    assert result.metrics_dataframe is not None
    assert result.metrics_dataframe["accuracy"].tolist() == [0.7, 0.9]
    assert result.path is not None
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert train.Result.from_path(result.path).metrics_dataframe is None, "without pandas"
    best = result.get_best_checkpoint("accuracy", "max")
    assert best == result.best_checkpoints[1][0]
    assert best.path.endswith("checkpoint_000001")
    assert result.checkpoint
    assert result.checkpoint.path.endswith("checkpoint_000003"), "the latest is kept, too"
    assert sorted(path.name for path in Path(result.path or "").glob("checkpoint_*")) == [
        f"checkpoint_00000{number}" for number in (1, 2, 3)
    ]
    assert result.metrics == {"accuracy": 0.1}
    again = train.Result.from_path(f"{result.path}/")
    assert again.best_checkpoints == result.best_checkpoints
    assert (again.checkpoint, again.reports) == (result.checkpoint, result.reports)
    lines = Path(result.path or "", "reports.jsonl").read_text().splitlines()
    assert [json.loads(line)["metrics"]["accuracy"] for line in lines] == [0.5, 0.9, 0.7, 0.6, 0.1]


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
    result = TorchTrainer(loop, scaling_config=here(), run_config=run).fit()
    assert result.best_checkpoints is not None
    assert [metrics for _, metrics in result.best_checkpoints] == [{"val": {"loss": 2.0}}]
    assert result.checkpoint
    assert result.checkpoint.path.endswith("checkpoint_000003")
    warning = "checkpoint_score_attribute is 'val/loss', but the metrics .* no such number"
    assert len(re.findall(warning, capfd.readouterr().out)) == 1


def test_failed_ranks_raise_their_exceptions_inside_rays(tmp_path: Path) -> None:
    def loop() -> None:
        rank = train.get_context().get_world_rank()
        raise KeyError(f"of rank {rank}")

    run = RunConfig(storage_path=tmp_path, settings=TIMEOUT)
    trainer = TorchTrainer(loop, scaling_config=here(2), run_config=run)
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
        TorchTrainer(lambda: time.sleep(100), scaling_config=here(), run_config=run).fit()
    assert isinstance(failed.value.__cause__, RunTimeout)


def test_the_training_function_has_a_process_group_and_a_device(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> Any:
        context = train.get_context()
        storage = context.get_storage()
        assert config == {}, "the default is an empty configuration"
        sizes = context.get_world_size(), dist.get_world_size()
        return str(get_device()), sizes, context.get_experiment_name(), storage.path

    run = RunConfig(name="mine", storage_path=tmp_path, settings=TIMEOUT)
    result = TorchTrainer(loop, scaling_config=here(2), run_config=run).fit()

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
    resumed = TorchTrainer(
        loop, scaling_config=here(), run_config=run, resume_from_checkpoint=checkpoint
    )
    assert resumed.fit().return_value == "1, 2, 3"
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


def test_a_configuration_can_change_until_the_training_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, scaling = RunConfig(), here()
    assert run.name != RunConfig().name
    assert run.storage_path == str(Path("~/distributor_results").expanduser())
    run.storage_path, run.settings = tmp_path, TIMEOUT
    trainer = TorchTrainer(lambda: None, run_config=run, scaling_config=scaling)
    trainer.run_config.name, scaling.num_workers = "later", 2
    trainer.run_config.logging_config.log_level = "warning"
    assert trainer.fit().path == str(tmp_path / "later")
    assert capfd.readouterr().err == "", "messages are below the level"
    scaling.num_workers = -1
    with pytest.raises(ValueError, match="num_workers has to be a positive integer"):
        trainer.fit()


def test_a_custom_sampler_is_kept_on_one_rank_and_replaced_on_several(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def share() -> Any:
        data = TensorDataset(torch.arange(4))
        weighted = DataLoader(data, sampler=WeightedRandomSampler([1.0, 0, 0, 0], 4))
        loader = prepare_data_loader(prepare_data_loader(weighted))
        kept = prepare_data_loader(weighted, add_dist_sampler=False)
        sampler = loader.sampler
        return [int(x) for (x,) in loader], len(kept), getattr(sampler, "num_replicas", None)

    assert share() == ([0] * 4, 4, None), "one rank"
    values = TorchDistributor(2, use_gpu=False, timeout=120).run_all(share)
    shares, lengths, replicas = zip(*values, strict=True)
    assert sorted(shares[0] + shares[1]) == [0, 1, 2, 3]
    assert (lengths, replicas) == ((4, 4), (2, 2))
    warning = "the WeightedRandomSampler of a data loader is replaced"
    assert capfd.readouterr().out.count(warning) == 1


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
