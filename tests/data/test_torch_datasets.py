"""Shares as datasets of PyTorch, which loaders and frameworks read whole on each rank."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tables import TableSource, points, shard_of
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset

from distributor import DistributorError, TorchDistributor, runtime, train
from distributor.train import Checkpoint
from distributor.train.torch import prepare_data_loader

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS, RANKS, BATCH, EPOCHS = 22, 2, 4, 3
SHARE = ROWS // RANKS
ENV = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return list(chain(*ids(batches)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_rows_of_any_numbers(sizes: list[int], ranks: int, data: st.DataObject) -> None:
    source, rank = points([*sizes, 3]), data.draw(st.integers(0, ranks - 1))
    shard = shard_of(source, rank, ranks, equal="pad")
    dataset = shard.dataset()
    expected = flat(shard.iter_torch_batches())
    assert len(dataset) == shard.count() == len(expected)
    numbers = data.draw(st.lists(st.integers(-len(expected), len(expected) - 1), max_size=20))
    found = [int(item["id"]) for item in dataset.__getitems__(numbers)]
    assert found == [expected[number] for number in numbers]


def test_items() -> None:
    table = pa.table({"id": [0, 1, 2], "name": ["a", "b", "c"], "pixels": [[1, 2], [3, 4], [5, 6]]})
    shard = shard_of(TableSource([table.slice(0, 2), table.slice(2)]))
    item = shard.dataset(dtypes={"id": torch.float16})[-1]
    assert (item["id"].item(), item["id"].dtype, item["id"].shape) == (2, torch.float16, ())
    assert (item["name"], item["pixels"].tolist()) == ("c", [5, 6])
    with pytest.raises(IndexError, match="row 3 of a dataset of 3 rows"):
        shard.dataset()[3]
    named = shard.dataset(transform=lambda row: row["name"])
    assert named.__getitems__([2, 0]) == ["c", "a"]
    assert list(named) == list(shard.iterable(transform=lambda row: row["name"]))
    [batch] = DataLoader(shard.dataset(), batch_size=3)
    assert batch["pixels"].shape == (3, 2)


def test_workers_share_the_rows() -> None:
    shard = shard_of(points([7, 8, 8]))
    assert list(shard.iter_torch_batches(batch_size=None)), "the parent has read in a thread"
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    for loader in (
        DataLoader(shard.dataset(), batch_size=5, shuffle=True, **options),
        DataLoader(shard.iterable(shuffle=True), batch_size=5, **options),
    ):
        epochs = [flat(loader), flat(loader)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 2
        assert epochs[0] != epochs[1]
    whole = DataLoader(shard.iterable(batch_size=5, drop_last=True), batch_size=None, **options)
    assert len(whole) == 4
    assert list(map(len, ids(whole))) == [5, 5, 5, 5]


def test_iterables_have_epochs() -> None:
    dataset = shard_of(points([30])).iterable(batch_size=5, shuffle=True)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    epochs = [flat(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    dataset.set_epoch(1)
    assert flat(loader) == epochs[1]


def test_a_share_is_not_sampled_for_several_ranks() -> None:
    share = shard_of(points([6]), 0, 2).dataset()
    for dataset in (share, Subset(share, [0, 1]), ConcatDataset([share, share])):
        sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=1)
        assert sorted(sampler) == list(range(len(dataset)))
    assert len(DistributedSampler([1, 2], num_replicas=2, rank=1)) == 1  # type: ignore[arg-type]


class Seen:
    """Records the rows that are read, as a transform.

    Parameters
    ----------
    source : TableSource
        The dataset, of which this rank reads its share.
    """

    def __init__(self, source: TableSource) -> None:
        self.shard = shard_of(source, runtime.get_global_rank(), runtime.get_world_size())
        self.rows: list[int] = []

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.rows += row["id"].reshape(-1).tolist()
        return row

    def epochs(self) -> list[list[int]]:
        assert len(self.rows) == EPOCHS * SHARE
        return [self.rows[at : at + SHARE] for at in range(0, len(self.rows), SHARE)]


def with_prepared_loader(source: TableSource, folder: str) -> list[list[int]]:
    seen = Seen(source)
    loader = prepare_data_loader(
        DataLoader(seen.shard.dataset(transform=seen), batch_size=BATCH, shuffle=True)
    )
    assert [len(list(loader)) for _ in range(EPOCHS)] == [3] * EPOCHS
    return seen.epochs()


def with_lightning(source: TableSource, folder: str) -> list[list[int]]:
    import lightning

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.line(batch["label"].float()[:, None]).square().mean()

        def predict_step(self, batch: Any, _: int) -> Any:
            return batch["id"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    seen = Seen(source)
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=RANKS,
        max_epochs=EPOCHS,
        default_root_dir=folder,
    )
    line = Line()
    trainer.fit(line, DataLoader(seen.shard.dataset(transform=seen), BATCH, shuffle=True))
    predicted: Any = trainer.predict(line, DataLoader(seen.shard.dataset(), BATCH))
    assert sorted(torch.cat(predicted).tolist()) == sorted(seen.rows[:SHARE])
    return seen.epochs()


def with_accelerate(source: TableSource, folder: str) -> list[list[int]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    seen = Seen(source)
    loader = accelerator.prepare(
        DataLoader(seen.shard.dataset(transform=seen), batch_size=BATCH, shuffle=True)
    )
    for _ in range(EPOCHS):
        gathered = [accelerator.gather_for_metrics(batch["id"]) for batch in loader]
        assert sorted(torch.cat(gathered).tolist()) == list(range(ROWS))
    accelerator.end_training()
    return seen.epochs()


class Line(torch.nn.Module):
    """A model whose predictions are the numbers of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, id: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        values = self.line(labels.float()[:, None])
        return {"loss": values.square().mean(), "logits": id[:, None]}


def with_transformers(source: TableSource, folder: str) -> list[list[int]]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    seen = Seen(source)
    trainer = Trainer(Line(), arguments, train_dataset=seen.shard.dataset(transform=seen))
    trainer.train()
    predicted = trainer.predict(seen.shard.dataset()).predictions
    assert sorted(predicted.ravel().tolist()) == list(range(ROWS)), "of all ranks"
    return seen.epochs()


@pytest.mark.parametrize(
    ("framework", "read"),
    [
        ("torch", with_prepared_loader),
        pytest.param("accelerate", with_accelerate, marks=pytest.mark.slow),
        pytest.param("lightning", with_lightning, marks=pytest.mark.slow),
        pytest.param("transformers", with_transformers, marks=pytest.mark.slow(ci=True)),
    ],
)
def test_a_framework_reads_each_row_of_a_share_once(
    framework: str, read: Callable[[TableSource, str], list[list[int]]], tmp_path: Path
) -> None:
    if find_spec(framework) is None:  # importing it here would only take time
        pytest.skip(f"{framework} is not installed")
    distributor = TorchDistributor(RANKS, use_gpu=False, timeout=120, env=ENV)

    shares = distributor.run_all(read, points([9, 9, 4]), str(tmp_path))

    for rank, epochs in enumerate(shares):
        own = list(range(rank * SHARE, (rank + 1) * SHARE))
        assert [sorted(epoch) for epoch in epochs] == [own] * EPOCHS
        assert epochs[0] != epochs[1], "each epoch is shuffled"


def read_until(source: TableSource, stop_at: int, of_batches: bool) -> list[int]:
    """Return the rows of the first epoch, and report each batch with a checkpoint."""
    seen = Seen(source)
    loader: Any = seen.shard.iter_torch_batches(batch_size=BATCH, shuffle=True)
    if not of_batches:
        loader = prepare_data_loader(DataLoader(seen.shard.dataset(), BATCH, shuffle=True))
    rows = []
    for number, batch in enumerate(loader, 1):
        rows += batch["id"].tolist()
        with tempfile.TemporaryDirectory() as folder:
            train.report({}, checkpoint=Checkpoint.from_directory(folder))
        if number == stop_at:
            break
    return rows


@pytest.mark.parametrize(("of_batches", "ranks"), [(False, 1), (True, 3)])
def test_a_restarted_run_reads_the_rest_of_an_epoch(
    tmp_path: Path, of_batches: bool, ranks: int
) -> None:
    seen: list[list[int]] = []
    for num_ranks, stop_at in ((2, 2), (ranks, 100)):
        run = TorchDistributor(
            num_ranks, use_gpu=False, timeout=120, storage_path=tmp_path, name="share", env=ENV
        )
        seen += run.run_all(read_until, points([9, 9, 4]), stop_at, of_batches)
    assert list(map(len, seen)) == [8, 8, *[6 // ranks] * ranks]
    assert sorted(chain(*seen)) == list(range(ROWS))


def test_a_checkpoint_of_ranks_that_do_not_read_in_step_is_refused(tmp_path: Path) -> None:
    def read(source: TableSource) -> None:
        rank = runtime.get_global_rank()
        shard = shard_of(source, rank, RANKS)
        if rank == 0:
            next(iter(shard.iter_batches(batch_size=BATCH)))
        with tempfile.TemporaryDirectory() as folder:
            train.report({}, checkpoint=Checkpoint.from_directory(folder))

    distributor = TorchDistributor(RANKS, use_gpu=False, storage_path=tmp_path, env=ENV)
    with pytest.raises(DistributorError, match="points in step: rank 0 has read 4 rows") as raised:
        distributor.run(read, points([9, 9, 4]))
    assert "but rank 1 has not read it" in str(raised.value)
