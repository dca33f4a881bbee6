"""TorchTrainer: its result, its checks of the input, and training that resumes."""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from support import plain, training
from support.reports import save
from support.training import BATCH, EPOCHS, SAMPLES, here, samples, trainer

from distributor import RunTimeout, TorchDistributor, train
from distributor.data.epochs import Progress
from distributor.train import (
    CheckpointConfig,
    RunConfig,
)
from distributor.train.torch import (
    TorchTrainer,
    prepare_model,
)
from distributor.train.torch.loaders import ShardSampler

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(training)
cloudpickle.register_pickle_by_value(plain)
TIMEOUT = {"timeout": 120, "show_output": "none"}


@pytest.mark.parametrize(
    "workers", [*(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2)), 3]
)
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
    shown = capfd.readouterr().err
    assert "TorchTrainer runs its ranks on executors of the active Spark session" in shown


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


def test_all_ranks_get_the_same_number_of_samples() -> None:
    length = 7
    for size in (1, 2, 5):
        for start in range(length + 1):
            every = [Progress(None, length, rank, size) for rank in range(size)]
            shares: list[Any] = [ShardSampler(list(range(length)), each, True) for each in every]  # type: ignore[arg-type]
            for share in shares:
                share.left = share.left.after(1, start)
            samples_of = [list(share) for share in shares]
            assert len({len(each) for each in samples_of}) == 1
            assert len({sample for each in samples_of for sample in each}) == length - start
            assert [len(each) for each in samples_of] == [-(-(length - start) // size)] * size


def test_best_checkpoints_are_kept(tmp_path: Path) -> None:
    def loop() -> None:
        for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.6]):
            saved = (
                save(tmp_path / str(step), "x")
                if train.get_context().get_world_rank() == 0
                else None
            )
            train.report({"accuracy": accuracy}, checkpoint=saved)
        train.report({"accuracy": 0.1}, checkpoint=None)

    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy")
    run = RunConfig("mine", tmp_path, checkpoint_config=config, settings=TIMEOUT)
    result = TorchTrainer(loop, scaling_config=here(2), run_config=run).fit()

    assert result.metrics == {"accuracy": 0.1}
    assert [report.metrics["accuracy"] for report in result.reports] == [0.5, 0.9, 0.7, 0.6, 0.1]
    assert [metrics["accuracy"] for _, metrics in result.best_checkpoints] == [0.7, 0.9]
    assert result.metrics_dataframe is not None
    assert result.metrics_dataframe["accuracy"].tolist() == [0.7, 0.9]
    assert result.get_best_checkpoint("accuracy", "max") == result.best_checkpoints[1][0]
    assert result.checkpoint
    assert result.checkpoint.path.endswith("checkpoint_000003"), "the latest is kept, too"
    kept = sorted(path.name[-1] for path in (tmp_path / "mine").glob("checkpoint_*"))
    assert kept == ["1", "2", "3"]
    again = train.Result.from_path(tmp_path / "mine")
    assert again.best_checkpoints == result.best_checkpoints
    assert (again.checkpoint, again.reports) == (result.checkpoint, result.reports)
