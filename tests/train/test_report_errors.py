"""Reports that cannot be made: every rank gets an error that names the cause."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.reports import save

from distributor import DistributorError, TorchDistributor, train
from distributor.core.rank_variables import CheckpointSettings
from distributor.train import Checkpoint, CheckpointUploadMode
from distributor.train.storage.checkpoint_store import Storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_ranks_that_do_not_share_the_storage_are_named(tmp_path: Path) -> None:
    """As on hosts on which the path is a folder of each host's own disk."""

    def report() -> None:
        rank = train.get_context().get_world_rank()
        os.environ["DISTRIBUTOR_TRAIN"] = CheckpointSettings(
            storage_path=str(tmp_path / f"of {min(rank, 1)}"), name="mine"
        ).to_variable()["DISTRIBUTOR_TRAIN"]
        train.report({"loss": 1.0})

    ranks = TorchDistributor(3, use_gpu=False, timeout=120)
    error = (
        rf"sees at {tmp_path}/of 0/mine: rank 1 on .*: its files do not appear there; rank 2 on "
    )
    with pytest.raises(DistributorError, match=error):
        ranks.run(report)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_failed_asynchronous_report_raises_from_a_later_one(tmp_path: Path) -> None:
    def report() -> None:
        missing = Checkpoint.from_directory(tmp_path / "missing")
        for checkpoint in itertools.chain([missing], itertools.repeat(None)):
            train.report({}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    with pytest.raises(DistributorError, match="There is no checkpoint at"):
        ranks.run(report)


def test_a_run_that_stores_nothing_leaves_no_folder(tmp_path: Path) -> None:
    storage = tmp_path / "all" / "runs"
    ranks = TorchDistributor(2, use_gpu=False, storage_path=storage, timeout=120)
    with pytest.raises(ZeroDivisionError):
        ranks.run(lambda: 1 / 0)
    assert list(tmp_path.iterdir()) == []
    ranks.run(lambda: train.report({"loss": 1.0}))
    assert [path.name for path in storage.glob("*/*")] == ["reports.jsonl"]


def test_what_cannot_be_reported_is_named(tmp_path: Path) -> None:
    """And a report of the same rank afterwards succeeds."""
    (tmp_path / "link").symlink_to(tmp_path / "runs")

    def report() -> None:
        import numpy
        import torch

        metrics = {"loss": torch.tensor(0.5), "names": ["a"], "confusion": numpy.eye(2)}
        train.report(metrics, checkpoint=save(tmp_path / "local", "x"))
        saved = save(tmp_path / "local", "x")
        large = {"log": "x" * 70_000_000}
        refused: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"checkpoint": "a path"}, TypeError, r"must be a Checkpoint, such as .*, but is 'a"),
            ({"metrics": {"weights": torch.ones(2)}}, TypeError, r"JSON-serial.* is tensor\(\[1"),
            ({"metrics": large}, ValueError, "'log' has 70 MB, but .* may have 64 MB"),
            ({"checkpoint": saved, "checkpoint_dir_name": ".."}, ValueError, "the name of a fold"),
        ]
        for folder in ("", "link/mine"):  # which would be deleted after the upload
            whole = {"checkpoint": Checkpoint(tmp_path / folder)}
            refused.append((whole, ValueError, "is inside the reported checkpoint"))
        for arguments, kind, message in refused:
            with pytest.raises(kind, match=message):
                train.report(**{"metrics": {}, **arguments})
        train.report({}, checkpoint=Checkpoint(tmp_path / "missing"))

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    with pytest.raises(DistributorError, match=r"Rank 0 could not .*There is no checkpoint at /"):
        ranks.run(report)
    [(_, manifest)] = Storage(tmp_path / "runs", "mine").committed()
    expected = {"loss": 0.5, "names": ["a"], "confusion": [[1.0, 0.0], [0.0, 1.0]]}
    assert manifest.metrics == expected


def test_a_rank_that_has_returned_is_not_waited_for(tmp_path: Path) -> None:
    def report() -> None:
        for number in range(1 if train.get_context().get_world_rank() == 1 else 2):
            train.report({}, save(tmp_path / str(number), "x"), checkpoint_upload_mode="ASYNC")

    ranks = TorchDistributor(3, use_gpu=False, storage_path=tmp_path / "runs", timeout=60)
    message = "rank 1 has returned after 1 report, but other ranks report once more"
    with pytest.raises(DistributorError, match=f"{message}. Every rank must call report"):
        ranks.run(report)
