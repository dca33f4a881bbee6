"""Where loaders go on after a restart, however a training makes and uses them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from distributor import TorchDistributor, train
from distributor.train import Checkpoint, RunConfig, ScalingConfig
from distributor.train.runtime.resumable_loader import ShardSampler
from distributor.train.torch import TorchTrainer, prepare_data_loader

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SAMPLES, BATCH, EPOCHS = 12, 3, 4


def make(shuffle: bool = True) -> Any:
    data = TensorDataset(torch.arange(SAMPLES))
    return prepare_data_loader(DataLoader(data, batch_size=BATCH, shuffle=shuffle))


def save(epoch: int, samples: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "epoch").write_text(str(epoch))
        checkpoint = Checkpoint.from_directory(folder)
        train.report({"epoch": epoch, "samples": samples}, checkpoint=checkpoint)


def go_on() -> int:
    found = train.get_checkpoint()
    return 0 if found is None else int(Path(found.path, "epoch").read_text())


def trained(folder: Path) -> list[list[int]]:
    """List the samples of each epoch, in the order of their training."""
    reports = train.Result.from_path(folder).reports
    return [
        [s for r in reports if r.metrics["epoch"] == epoch for s in r.metrics["samples"]]
        for epoch in range(EPOCHS)
    ]


def fit(stop_at: tuple[int, int] | None, anew: bool, says_epoch: bool, late: bool) -> None:
    """Train, and stop after so many batches of an epoch.

    Parameters
    ----------
    stop_at : (int, int) or None
        The epoch and the batch.
    anew : bool
        Whether each epoch has a loader of its own.
    says_epoch : bool
        Whether ``set_epoch`` is called.
    late : bool
        Whether something is reported before the first batch.
    """
    first = go_on()
    loader = None if anew else make()
    if late:
        save(first, [])
        if stop_at == (first, 0):
            return
    for epoch in range(first, EPOCHS):
        if anew:
            loader = make()
        assert loader is not None
        if says_epoch:
            loader.sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader, 1):
            save(epoch, batch.tolist())
            if (epoch, number) == stop_at:
                return


@pytest.mark.parametrize("says_epoch", [True, False])
@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_each_sample_is_trained_once_in_each_epoch(
    tmp_path: Path, anew: bool, says_epoch: bool, late: bool
) -> None:
    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="x", timeout=120)
    ranks.run(fit, (2, 2), anew, says_epoch, False)
    ranks.run(fit, (2, 1), anew, says_epoch, late)  # one more batch of the same epoch
    if late:
        ranks.run(fit, (2, 0), anew, says_epoch, late)
    ranks.run(fit, None, anew, says_epoch, late)
    for epoch, samples in enumerate(trained(tmp_path / "x")):
        assert sorted(samples) == list(range(SAMPLES)), epoch


def test_epochs_differ_without_a_word(tmp_path: Path) -> None:
    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="x", timeout=120)
    ranks.run(fit, None, False, False, False)
    unsaid = trained(tmp_path / "x")
    assert len({tuple(epoch) for epoch in unsaid}) == EPOCHS
    said = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, name="y", timeout=120)
    said.run(fit, None, False, True, False)
    assert trained(tmp_path / "y") == unsaid, "the same orders as with set_epoch"


def test_another_trainings_checkpoint_brings_the_position_along(tmp_path: Path) -> None:
    def trainer(name: str, stop_at: Any, begin: Checkpoint | None) -> TorchTrainer:
        return TorchTrainer(
            lambda: fit(stop_at, anew=False, says_epoch=True, late=False),
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name, tmp_path, settings={"timeout": 120}),
            resume_from_checkpoint=begin,
        )

    begun = trainer("begun", (2, 2), None).fit()
    trainer("other", None, begun.checkpoint).fit()

    before, after = trained(tmp_path / "begun")[2], trained(tmp_path / "other")[2]
    assert len(before) == len(after) == SAMPLES // 2
    assert sorted(before + after) == list(range(SAMPLES))


def test_a_pass_that_is_said_again_is_the_same() -> None:
    share = ShardSampler(SAMPLES, shuffle=True, rank=0, size=1)
    share.set_epoch(3)
    assert share.is_set
    assert list(share) == list(share)


@pytest.mark.parametrize(
    "how",
    [
        lambda data: {
            "batch_sampler": BatchSampler(RandomSampler(data), 4, drop_last=False),
        },
        lambda data: {"sampler": RandomSampler(data, replacement=True)},
        lambda data: {"sampler": RandomSampler(data, num_samples=100)},
    ],
)
def test_samplers_that_would_be_lost_are_refused(how: Any) -> None:
    data = TensorDataset(torch.arange(SAMPLES))
    with pytest.raises(ValueError, match=r"would discard its .*Sampler"):
        prepare_data_loader(DataLoader(data, **how(data)))
