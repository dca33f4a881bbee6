"""The position at which data loaders resume, however a training creates and uses them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Sampler,
    TensorDataset,
)

from distributor import TorchDistributor, train
from distributor.train import Checkpoint, RunConfig, ScalingConfig
from distributor.train.torch import TorchTrainer, prepare_data_loader

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SAMPLES, BATCH, EPOCHS = 12, 3, 4


def make_loader(shuffle: bool = True) -> Any:
    data = TensorDataset(torch.arange(SAMPLES))
    return prepare_data_loader(DataLoader(data, batch_size=BATCH, shuffle=shuffle))


def save(epoch: int, samples: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "epoch").write_text(str(epoch))
        checkpoint = Checkpoint.from_directory(folder)
        train.report({"epoch": epoch, "samples": samples}, checkpoint=checkpoint)


def first_epoch() -> int:
    found = train.get_checkpoint()
    return 0 if found is None else int(Path(found.path, "epoch").read_text())


def trained_samples(folder: Path) -> list[list[int]]:
    """Return the samples of each epoch, in the order in which they were trained on."""
    reports = train.Result.from_path(folder).reports
    return [
        [s for r in reports if r.metrics["epoch"] == epoch for s in r.metrics["samples"]]
        for epoch in range(EPOCHS)
    ]


def fit(
    stop_at: tuple[int, int] | None, new_loaders: bool, calls_set_epoch: bool, reports_first: bool
) -> None:
    """Train, and stop after a number of batches in an epoch; None never stops.

    Each epoch may create its own loader or call ``set_epoch``; a report may come before any batch.
    """
    first = first_epoch()
    loader = None if new_loaders else make_loader()
    if reports_first:
        save(first, [])
        if stop_at == (first, 0):
            return
    for epoch in range(first, EPOCHS):
        if new_loaders:
            loader = make_loader()
        assert loader is not None
        if calls_set_epoch:
            loader.sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader, 1):
            save(epoch, batch.tolist())
            if (epoch, number) == stop_at:
                return


@pytest.mark.parametrize(
    ("new_loaders", "calls_set_epoch", "reports_first"),
    [
        (False, False, True),
        pytest.param(True, True, True, marks=pytest.mark.slow),
        pytest.param(True, False, False, marks=pytest.mark.slow),
    ],
)
def test_each_sample_is_trained_on_once_in_each_epoch(
    tmp_path: Path, new_loaders: bool, calls_set_epoch: bool, reports_first: bool
) -> None:
    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="x", timeout=120)
    ranks.run(fit, (2, 2), new_loaders, calls_set_epoch, False)
    # Train on one more batch of the same epoch.
    ranks.run(fit, (2, 1), new_loaders, calls_set_epoch, reports_first)
    if reports_first:
        ranks.run(fit, (2, 0), new_loaders, calls_set_epoch, reports_first)
    ranks.run(fit, None, new_loaders, calls_set_epoch, reports_first)
    for epoch, samples in enumerate(trained_samples(tmp_path / "x")):
        assert sorted(samples) == list(range(SAMPLES)), epoch


def test_the_order_of_epochs_differs_without_set_epoch(tmp_path: Path) -> None:
    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="x", timeout=120)
    ranks.run(fit, None, False, False, False)
    without = trained_samples(tmp_path / "x")
    assert len({tuple(epoch) for epoch in without}) == EPOCHS
    other = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="y", timeout=120)
    other.run(fit, None, False, True, False)
    assert trained_samples(tmp_path / "y") == without, "the same orders as with set_epoch"


def test_a_checkpoint_of_another_training_contains_the_position(tmp_path: Path) -> None:
    def trainer(name: str, stop_at: Any, checkpoint: Checkpoint | None) -> TorchTrainer:
        return TorchTrainer(
            lambda: fit(stop_at, new_loaders=False, calls_set_epoch=True, reports_first=False),
            scaling_config=ScalingConfig(local_mode=True),
            run_config=RunConfig(name, tmp_path, settings={"timeout": 120}),
            resume_from_checkpoint=checkpoint,
        )

    stopped = trainer("stopped", (2, 2), None).fit()
    trainer("other", None, stopped.checkpoint).fit()

    before, after = trained_samples(tmp_path / "stopped")[2], trained_samples(tmp_path / "other")[2]
    assert len(before) == len(after) == SAMPLES // 2
    assert sorted(before + after) == list(range(SAMPLES))


class Batches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


def test_a_batch_sampler_would_be_discarded_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=Batches())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"would discard the batches of its .*Batch"):
        prepare_data_loader(loader)
