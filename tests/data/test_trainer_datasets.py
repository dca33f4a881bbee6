"""DataFrames as the datasets of a `TorchTrainer`, under Ray Train's names."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from distributor import train
from distributor.data import from_spark
from distributor.train import DataConfig, RunConfig, ScalingConfig
from distributor.train.torch import TorchTrainer

pytestmark = pytest.mark.spark

ROWS = 97


def run_config(folder: Path) -> RunConfig:
    return RunConfig(name="rows", storage_path=str(folder))


def test_datasets_are_split_or_whole(spark: Any, tmp_path: Path) -> None:
    def loop() -> None:
        found = {}
        for name in ("train", "valid"):
            batches = train.get_dataset_shard(name).iter_torch_batches(batch_size=5)
            found[name] = [number for batch in batches for number in batch["id"].tolist()]
        rank = train.get_context().get_world_rank()
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))
        with pytest.raises(KeyError, match=r"no dataset 'test': there are \['train', 'valid'\]"):
            train.get_dataset_shard("test")
        train.report({"rows": train.get_dataset_shard().count()})

    result = TorchTrainer(
        loop,
        datasets={"train": spark.range(0, ROWS, 1, 3), "valid": from_spark(spark.range(10))},
        dataset_config=DataConfig(datasets_to_split=["train"]),
        scaling_config=ScalingConfig(num_workers=2, local_mode=True),
        run_config=run_config(tmp_path / "runs"),
    ).fit()

    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [len(each["train"]) for each in found] == [ROWS // 2] * 2, "the rest is dropped"
    assert sorted(chain(*(each["train"] for each in found))) == list(range(ROWS - 1))
    assert [each["valid"] for each in found] == [list(range(10))] * 2
    assert result.metrics == {"rows": ROWS // 2}


def read_and_report(config: dict[str, Any]) -> None:
    """Read an epoch in steps, note the rows of each step, and let a rank die after one."""
    rank = train.get_context().get_world_rank()
    shard = train.get_dataset_shard("train")
    batches = shard.iter_torch_batches(batch_size=4, shuffle=True, seed=5)
    notes = Path(config["notes"], f"{config['run']}-{rank}")
    for step, batch in enumerate(batches, 1):
        with notes.open("a") as file:
            file.write(json.dumps([step, batch["id"].tolist()]) + "\n")
        with tempfile.TemporaryDirectory() as folder:
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))
        if step == config["dies_after"] and rank == config["ranks"] - 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("local_mode", "sizes"),
    [
        (True, (2, 3, 1)),
        pytest.param(False, (2, 4, 1), marks=pytest.mark.slow),
    ],
)
def test_after_kills_each_row_is_read_once_on_other_numbers_of_ranks(
    spark: Any, tmp_path: Path, local_mode: bool, sizes: tuple[int, ...]
) -> None:
    frame = spark.range(0, ROWS, 1, 5)
    rows: list[int] = []
    for run, size in enumerate(sizes):
        dies_after = run + 2 if run < len(sizes) - 1 else None
        trainer = TorchTrainer(
            read_and_report,
            train_loop_config={
                "notes": str(tmp_path),
                "run": run,
                "ranks": size,
                "dies_after": dies_after,
            },
            datasets={"train": from_spark(frame, equal=False)},
            scaling_config=ScalingConfig(num_workers=size, local_mode=local_mode),
            run_config=run_config(tmp_path / "runs"),
        )
        if dies_after is None:
            trainer.fit()
        else:
            with pytest.raises(train.WorkerGroupError):
                trainer.fit()
        for rank in range(size):
            for line in (tmp_path / f"{run}-{rank}").read_text().splitlines():
                step, numbers = json.loads(line)
                if dies_after is None or step <= dies_after:  # later ones are not reported
                    rows += numbers
    assert sorted(rows) == list(range(ROWS))


def test_invalid_datasets() -> None:
    datasets: Any = {"train": [1]}
    with pytest.raises(TypeError, match=r"datasets\['train'\] is of type builtins.list. Pass a"):
        TorchTrainer(lambda: None, datasets=datasets)
    config = DataConfig(datasets_to_split=["trian"])
    with pytest.raises(ValueError, match=r"datasets_to_split has \['trian'\]"):
        TorchTrainer(lambda: None, datasets={}, dataset_config=config)
