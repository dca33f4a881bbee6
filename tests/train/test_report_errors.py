"""Reports that cannot be made: every rank gets an error that names the cause."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.reports import TouchWhenPrinted, save
from support.waiting import until

from distributor import DistributorError, Listener, TorchDistributor, WorkerDied, train
from distributor.core.checkpoint_config import CheckpointSettings
from distributor.rank.messages import Reported
from distributor.train import Checkpoint, CheckpointUploadMode
from distributor.train.runtime import store_channel
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import MANIFEST

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_the_cause_is_the_rank_that_dies_not_the_rank_that_waits(tmp_path: Path) -> None:
    def report() -> None:
        train.get_checkpoint()
        if train.get_context().get_world_rank() == 0:
            until((tmp_path / "waits").exists, "rank 1 waits", 60)
            os._exit(5)
        (tmp_path / "waits").touch()
        train.report({"loss": 1.0})

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    with pytest.raises(WorkerDied, match=r"rank 0 .* exited with code 5"):
        ranks.run(report)


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


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_that_stores_nothing_leaves_no_folder(tmp_path: Path, exists: bool) -> None:
    storage = tmp_path / "all" / "runs"
    if exists:
        storage.mkdir(parents=True)
    ranks = TorchDistributor(2, use_gpu=False, storage_path=storage, timeout=120)
    ranks.run(print)
    with pytest.raises(ZeroDivisionError):
        ranks.run(lambda: 1 / 0)
    assert list(tmp_path.rglob("*")) == ([storage.parent, storage] if exists else [])
    ranks.run(lambda: train.report({"loss": 1.0}))
    assert [path.name for path in storage.glob("*/*")] == ["reports.jsonl"]


@pytest.mark.spark
def test_storage_is_checked_before_the_function_runs(spark: Any, tmp_path: Path) -> None:
    """The path is another folder on each executor, and the function could run for days."""
    ranks = TorchDistributor(
        4, local_mode=False, use_gpu=False, storage_path="/proc/self/cwd/runs", timeout=120
    )
    with pytest.raises(DistributorError, match="The ranks do not share the storage") as caught:
        ranks.run((tmp_path / "ran").touch)
    assert not (tmp_path / "ran").exists()
    assert hasattr(caught.value, "rank_failures")


def test_unwritable_storage_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    with pytest.raises(DistributorError, match=r"Rank 0 on .* cannot write to .*: NotADir"):
        ranks.run(lambda: train.report({"loss": 1.0}))


def test_invalid_checkpoints_are_errors(tmp_path: Path) -> None:
    def report(case: str) -> None:
        folder = tmp_path / "folder"
        checkpoint: Any = str(folder) if case == "path" else Checkpoint.from_directory(folder)
        train.report({"loss": 1.0}, checkpoint=checkpoint)

    ranks = TorchDistributor(2, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    with pytest.raises(TypeError, match=r"must be a Checkpoint, such as .*, but is '/"):
        ranks.run(report, "path")
    with pytest.raises(DistributorError, match=r"Rank 0 could not .*There is no checkpoint at /"):
        ranks.run(report, "missing")
    assert not any((tmp_path / "runs").rglob(MANIFEST))


@pytest.mark.parametrize("mode", ["ASYNC", pytest.param("SYNC", marks=pytest.mark.slow)])
def test_the_folder_of_the_run_is_no_checkpoint(tmp_path: Path, mode: str) -> None:
    """It would be deleted after the upload, with all that is already saved."""
    (tmp_path / "link").symlink_to(tmp_path / "runs")

    def report() -> list[str]:
        train.report({}, checkpoint=save(tmp_path, "x"))
        refused = []
        for folder in ("", "runs", "runs/mine", "link/mine"):
            try:
                train.report(
                    {},
                    checkpoint=Checkpoint(tmp_path / folder),
                    checkpoint_upload_mode=CheckpointUploadMode(mode),
                )
            except ValueError as error:
                refused.append(str(error))
        return refused

    storage = {"storage_path": tmp_path / "runs", "name": "mine"}
    refused = TorchDistributor(1, use_gpu=False, timeout=120, **storage).run(report)
    assert len(refused) == 4
    assert all("is inside the reported checkpoint" in message for message in refused)
    assert (tmp_path / "runs/mine/checkpoint_000000/0.txt").read_text() == "x"


def test_metrics_can_be_tensors_with_one_element_and_arrays(tmp_path: Path) -> None:
    def report() -> None:
        import numpy
        import torch

        metrics = {"loss": torch.tensor(0.5), "names": ["a"], "classes": numpy.ones(1)}
        metrics |= {"confusion": numpy.eye(2), "count": numpy.int64(3)}
        train.report(metrics, checkpoint=save(tmp_path, "x"))
        train.report({"weights": torch.ones(2)})

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs", name="mine")
    with pytest.raises(TypeError, match=r"Metrics must be JSON-serializable.* one is tensor\(\[1"):
        ranks.run(report)
    [(_, manifest)] = Storage(tmp_path / "runs", "mine").committed()
    assert manifest.metrics == {
        "loss": 0.5,
        "names": ["a"],
        "classes": [1.0],
        "confusion": [[1.0, 0.0], [0.0, 1.0]],
        "count": 3,
    }


def test_a_large_metric_is_reported_and_one_that_is_too_large_is_named(tmp_path: Path) -> None:
    def report() -> None:
        train.report({"loss": 0.5, "log": "x" * 10_000_000})
        train.report({"loss": 0.5, "log": "x" * 70_000_000})

    received: list[int] = []

    class Sizes(Listener):
        def reported(self, report: Reported) -> None:
            received.append(len(report.metrics[0]["log"]))

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path, listeners=[Sizes()])
    expected = r"The metric 'log' has 70 MB, but the metrics of a report may have 64 MB in all"
    with pytest.raises(ValueError, match=expected):
        ranks.run(report)
    assert received == [10_000_000]


def test_report_outside_a_run_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match="report and get_checkpoint can only be called by the ranks"
    ):
        train.report({"loss": 1.0})
    assert train.get_context().get_world_size() == 1


def test_a_text_does_not_have_the_local_checkpoint_deleted() -> None:
    deletes: Any = "False"
    with pytest.raises(TypeError, match=r"after_upload must be True or False, but is 'False'"):
        train.report({"loss": 1.0}, delete_local_checkpoint_after_upload=deletes)


def test_report_without_storage_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="This run has no storage: pass a storage_path"):
        TorchDistributor(1, use_gpu=False).run(lambda: train.report({}))


@pytest.mark.parametrize("name", ["epochs/3", ".", "..", "../elsewhere", "", 3])
def test_an_invalid_checkpoint_name_is_an_error(tmp_path: Path, name: Any) -> None:
    def report() -> None:
        train.report({}, checkpoint=save(tmp_path / "local", "x"), checkpoint_dir_name=name)

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs")
    with pytest.raises(
        ValueError, match="checkpoint_dir_name must be the name of a folder, but is"
    ):
        ranks.run(report)


def test_a_failed_asynchronous_report_raises_from_a_later_one(tmp_path: Path) -> None:
    def report() -> None:
        missing = Checkpoint.from_directory(tmp_path / "missing")
        for checkpoint in itertools.chain([missing], itertools.repeat(None)):
            train.report({}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    ranks = TorchDistributor(1, use_gpu=False, storage_path=tmp_path / "runs", timeout=120)
    with pytest.raises(DistributorError, match="There is no checkpoint at"):
        ranks.run(report)


QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""With it, waits time out sooner. Ranks with this variable need a zygote of their own."""


def test_ranks_that_do_not_report_are_named_in_the_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def report() -> None:
        train.report({"loss": 2.0})
        store_channel.RANK_TIMEOUT_SECONDS, store_channel.LATE_WARNING_SECONDS = 6.0, 2.0
        if train.get_context().get_world_rank() in (0, 2):
            train.report({"loss": 1.0})
        else:
            time.sleep(100)  # until the failed run ends it

    ranks = TorchDistributor(4, use_gpu=False, storage_path=tmp_path, env=QUIET, timeout=120)
    waits = r"rank 0 still waits for ranks 1, 3"
    with pytest.raises(DistributorError, match=f"After 6 s, {waits}. Every rank must call"):
        ranks.run(report)
    assert re.search(f"After 2 s, {waits} to report", capfd.readouterr().out)


def test_a_late_rank_is_waited_for(tmp_path: Path) -> None:
    warned = tmp_path / "warned"

    def report() -> int:
        train.report({"step": 0})
        store_channel.LATE_WARNING_SECONDS = 0.5
        if train.get_context().get_world_rank() == 1:
            until(warned.exists, "rank 0 has named rank 1", 60)
        train.report({"step": 1})
        return 1

    listener = TouchWhenPrinted(b"rank 0 still waits for rank 1 to report", warned)
    ranks = TorchDistributor(
        3, use_gpu=False, storage_path=tmp_path, env=QUIET, timeout=120, listeners=[listener]
    )
    assert ranks.run_all(report) == [1, 1, 1]


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ((1, 2, 2), "rank 0 has returned after 1 report, but other ranks report once more"),
        ((2, 1, 2), "rank 1 has returned after 1 report, but other ranks report once more"),
        pytest.param(
            (1, 1, 2),
            "rank 0 has returned after 1 report, but other ranks report once more",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("mode", ["SYNC", pytest.param("ASYNC", marks=pytest.mark.slow)])
def test_a_rank_that_has_returned_is_not_waited_for(
    tmp_path: Path, reports: tuple[int, ...], message: str, mode: str
) -> None:
    def report() -> None:
        for _ in range(reports[train.get_context().get_world_rank()]):
            train.report({}, save(tmp_path, "x"), checkpoint_upload_mode=CheckpointUploadMode(mode))

    ranks = TorchDistributor(3, use_gpu=False, storage_path=tmp_path / "runs", timeout=60)
    with pytest.raises(DistributorError, match=f"{message}. Every rank must call report"):
        ranks.run(report)
