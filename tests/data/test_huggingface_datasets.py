"""A rank's rows as datasets of Hugging Face's ``datasets``, which no trainer divides once more."""

from __future__ import annotations

import os
import signal
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from support.tables import TableSource, points, shard_of

from distributor import TorchDistributor, runtime
from distributor.data.torch_datasets import is_rank_share

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.slow
datasets = pytest.importorskip("datasets")
ROWS, BATCH = 23, 4
KEPT = {*range(23)} - {5, 6, 12, 13, 19, 20}  # of two ranks, not the same number
ENV = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Line(torch.nn.Module):
    """A model that notes the rows that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.rows: list[int] = []

    def forward(self, id: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.rows += id.tolist()
        return {"loss": self.line(labels.float()[:, None]).square().mean()}


def dataset_of(source: TableSource, way: str) -> Any:
    rank, size = runtime.get_global_rank(), runtime.get_world_size()
    shard = shard_of(source, rank, size, equal="pad")
    return {
        "torch": shard.dataset,
        "rows": lambda: datasets.Dataset.from_list(list(shard.iter_rows())),
        "stream of rows": lambda: datasets.IterableDataset.from_generator(shard.iter_rows),
        "share": shard.to_huggingface,
        "streaming": lambda: shard.to_huggingface(streaming=True),
        "filtered": lambda: shard.to_huggingface().filter(lambda row: row["id"] in KEPT),
    }[way]()


def fit(
    source: TableSource, way: str, folder: str, steps: int = -1, kill_at: int | None = None
) -> list[int]:
    """Train for an epoch, or some steps, and return the rows of this rank."""
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    class Kill(transformers.TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if first and state.global_step == kill_at and runtime.get_global_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=1,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        remove_unused_columns=False,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    model, data = Line(), dataset_of(source, way)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Kill()])
    os.makedirs(folder, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return model.rows


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow(ci=True))])
def test_each_row_is_trained_on_once(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fit_all(source: TableSource, folder: str) -> dict[str, list[int]]:
        steps = -(-ROWS // (BATCH * ranks))
        return {
            way: fit(source, way, f"{folder}/{way}", steps if "stream" in way else -1)
            for way in ("torch", "share", "streaming", "filtered", "rows", "stream of rows")
        }

    of_ranks = TorchDistributor(ranks, use_gpu=False, timeout=200, env=ENV).run_all(
        fit_all, points([9, 9, 5]), str(tmp_path)
    )

    for way in ("torch", "share", "streaming"):
        rows = list(chain(*(found[way] for found in of_ranks)))
        assert set(rows) == set(range(ROWS)), way
        assert len(rows) <= -(-ROWS // (BATCH * ranks)) * BATCH * ranks, way
    assert set(chain(*(found["filtered"] for found in of_ranks))) == KEPT
    asked = capfd.readouterr().out
    assert asked.count("Are these the rows of this rank's share of points?") == 2 * (ranks > 1)
    assert ("pass points.to_huggingface()" in asked) == (ranks > 1)


def test_a_restarted_trainer_skips_what_it_had(tmp_path: Path) -> None:
    """The Trainer itself skips, so that a share begins anew in each attempt."""
    distributor = TorchDistributor(2, use_gpu=False, timeout=200, env=ENV, max_failures=1)
    whole = distributor.run_all(fit, points([9, 9, 6]), "share", str(tmp_path / "whole"))
    killed = distributor.run_all(
        fit, points([9, 9, 6]), "share", str(tmp_path / "killed"), kill_at=2
    )
    assert sorted(chain(*whole)) == list(range(24))
    assert killed == [rows[BATCH:] for rows in whole], "the first step is in the checkpoint"


def test_what_is_made_of_a_share_is_one_too() -> None:
    share = shard_of(points([6, 4]), 0, 2).to_huggingface()
    stream = shard_of(points([6, 4]), 0, 2).to_huggingface(streaming=True)
    made = [
        share.map(lambda row: {"next": row["id"] + 1}),
        share.shuffle(seed=1).select(range(3)),
        share.train_test_split(0.2)["train"],
        datasets.concatenate_datasets([share, share.rename_column("label", "y")]),
        stream.map(lambda row: {"next": row["id"] + 1}).shuffle(buffer_size=2),
    ]
    assert all(map(is_rank_share, [share, stream, *made]))
    assert not is_rank_share(datasets.Dataset.from_list(share.to_list()))
    whole = shard_of(points([6, 4]), 0, 2, split=False).to_huggingface()
    assert len(whole) == 10
    assert not is_rank_share(whole), "Accelerate is to divide it"


def test_workers_of_a_loader_divide_a_stream() -> None:
    stream = shard_of(points([9, 9, 5])).to_huggingface(streaming=True).with_format("torch")
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = torch.utils.data.DataLoader(stream, batch_size=4, **options)
    rows = [torch.cat([batch["id"] for batch in loader]) for _ in range(2)]
    assert [sorted(each.tolist()) for each in rows] == [list(range(ROWS))] * 2
