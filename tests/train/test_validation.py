"""Validation of checkpoints in the background."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.reports import save
from support.waiting import assert_gone, until

from distributor import train
from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    ValidationTaskConfig,
)
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.files import MANIFEST, PENDING, Manifest, StoredValidation
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SETTINGS = {"timeout": 120, "show_output": "none"}


def trainer(
    folder: Path,
    loop: Callable[[], Any],
    validation: ValidationConfig | None,
    *,
    checkpoints: CheckpointConfig | None = None,
    workers: int = 1,
) -> TorchTrainer:
    return TorchTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=workers, local_mode=True),
        run_config=RunConfig(
            name="mine",
            storage_path=folder / "runs",
            checkpoint_config=checkpoints,
            settings=SETTINGS,
        ),
        validation_config=validation,
    )


def statuses(folder: Path) -> dict[str, str]:
    """Return the status of each checkpoint that exists."""
    found = Storage(folder / "runs", "mine").committed()
    return {name.removeprefix("checkpoint_00000"): manifest.status for name, manifest in found}


def test_metrics_of_a_validation_join_those_of_the_report(tmp_path: Path) -> None:
    go, order = tmp_path / "go", tmp_path / "order"

    def loop() -> Any:
        for step in range(3):
            validation = {0: True, 1: ValidationTaskConfig({"more": 5}), 2: False}[step]
            # Only that of the first rank with a checkpoint counts.
            rank = train.get_context().get_world_rank()
            mine = validation if rank == 0 else not validation
            train.report({"loss": -step}, save(tmp_path / str(step), str(step)), validation=mine)
        early = train.get_all_reported_checkpoints("COMMITTED")
        [*_, last] = train.get_all_reported_checkpoints(timeout_s=0.01)
        go.touch()
        late = train.get_all_reported_checkpoints()
        return [[each.status.name for each in all_] for all_ in (early, late)], last.status.name

    def validate(checkpoint: Checkpoint, start: int, more: int = 0) -> dict[str, Any]:
        until(go.exists, "the training continues", 60)
        with checkpoint.as_directory() as folder, order.open("a") as file:
            step = Path(folder, "0.txt").read_text()
            file.write(f"begins {step}, ends {step}, ")
        return {"score": start + more, "loss": -10 if more else 10}

    result = trainer(
        tmp_path,
        loop,
        ValidationConfig(validate, ValidationTaskConfig({"start": 1})),
        checkpoints=CheckpointConfig(checkpoint_score_attribute="loss"),
        workers=2,
    ).fit()

    pending, validated, committed = "PENDING_VALIDATION", "VALIDATED", "COMMITTED"
    assert result.metrics == {"loss": -2}, "of the latest report"
    assert result.return_value == (
        [[committed, pending, pending], [validated, committed, validated]],
        pending,
    )
    assert order.read_text() == "begins 0, ends 0, begins 1, ends 1, ", "in order, one at a time"
    found = Storage(tmp_path / "runs", "mine").committed()
    assert [manifest.metrics for _, manifest in found] == [
        {"loss": 10, "score": 1},
        {"loss": -10, "score": 6},
        {"loss": -2},
    ]


def test_a_validation_of_an_earlier_checkpoint_of_the_same_name_is_ignored(
    tmp_path: Path,
) -> None:
    """The earlier one was removed while its validation ran."""
    storage = Storage(tmp_path, "mine")
    reported = Manifest(index=1, metrics={"loss": 2}, world_size=1, files=(), status=PENDING)
    storage.write(f"full_model/{MANIFEST}", reported.to_json())

    earlier = StoredValidation(index=0, status="VALIDATED", metrics={"loss": 1, "score": 5})
    storage.add_validation("full_model", earlier)
    assert storage.manifest_of("full_model") == reported

    storage.add_validation("full_model", StoredValidation(index=1, status="VALIDATED"))
    found = storage.manifest_of("full_model")
    assert found
    assert (found.status, found.metrics) == ("VALIDATED", {"loss": 2})

    for path in (tmp_path / "mine" / "full_model").glob(".validation*"):
        path.write_text('{"index": 1, "st')  # as if killed while it is written
    assert storage.manifest_of("full_model") == reported


def test_validated_scores_decide_which_checkpoints_are_kept(tmp_path: Path) -> None:
    def loop() -> Any:
        kept = []
        for score in (4, 3, 2, 1):
            saved = save(tmp_path / str(score), "x")
            train.report({"score": score}, saved, validation=score != 4)
            kept.append(len(train.get_all_reported_checkpoints("COMMITTED")))
        (tmp_path / "go").touch()
        return kept

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        until((tmp_path / "go").exists, "all are reported", 60)
        return {"score": 5} if checkpoint.path.endswith("2") else {}

    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    result = trainer(tmp_path, loop, ValidationConfig(validate), checkpoints=config).fit()

    assert result.return_value == [1, 2, 3, 4], "none is removed that is yet to be validated"
    assert statuses(tmp_path) == {"0": "COMMITTED", "2": "VALIDATED", "3": "VALIDATED"}
    scores = {metrics["score"] for _, metrics in result.best_checkpoints}
    assert scores >= {4, 5}, "the best two"
    assert result.checkpoint
    assert result.checkpoint.path.endswith("3"), "the latest"


def test_a_validation_that_fails_does_not_fail_the_training(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    def loop() -> None:
        for how in ("raises", "hangs", "returns"):
            task = ValidationTaskConfig({"how": how}, timeout_s=2 if how == "hangs" else None)
            train.report({"how": how}, save(tmp_path / how, "x"), validation=task)

    def validate(checkpoint: Checkpoint, how: str) -> Any:
        if how == "raises":
            raise KeyError("of the user")
        if how == "hangs":
            (tmp_path / "pid").write_text(str(os.getpid()))
            threading.Event().wait()
        return 3

    result = trainer(tmp_path, loop, ValidationConfig(validate)).fit()

    assert result.metrics == {"how": "returns"}
    assert statuses(tmp_path) == {
        "0": "VALIDATION_FAILED",
        "1": "VALIDATION_TIMEOUT",
        "2": "VALIDATION_FAILED",
    }
    raised, late, returned = warned()
    assert "The validation of checkpoint_000000 failed, so it adds no metrics" in raised
    assert "in validate" in raised
    assert "KeyError: 'of the user'" in raised
    assert "The validation of checkpoint_000001 took longer than timeout_s, 2 s" in late
    assert "in validate" in late, "its stack"
    assert "must return a dict of metrics, but has returned 3" in returned
    assert_gone([int((tmp_path / "pid").read_text())])


DRIVER = """
import os, sys, threading
from pathlib import Path
from distributor import train
from distributor.train import Checkpoint, RunConfig, ValidationConfig
from distributor.train.torch import TorchTrainer

folder = Path(sys.argv[1])

def loop():
    (folder / "local").mkdir()
    checkpoint = Checkpoint(folder / "local")
    train.report({"step": 1}, checkpoint, checkpoint_dir_name="a", validation=True)

def validate(checkpoint):
    (folder / "pid").write_text(str(os.getpid()))
    threading.Event().wait()

run_config = RunConfig("mine", folder / "runs")
TorchTrainer(loop, run_config=run_config, validation_config=ValidationConfig(validate)).fit()
"""


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_the_next_run_repeats_a_validation_whose_driver_was_killed(
    tmp_path: Path, signum: signal.Signals
) -> None:
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with subprocess.Popen(command) as driver:
        until(lambda: pid.exists() and pid.read_text(), "the validation begins", 120)
        driver.send_signal(signum)
    assert driver.returncode != 0
    assert_gone([int(pid.read_text())])
    assert statuses(tmp_path) == {"a": "PENDING_VALIDATION"}

    result = trainer(tmp_path, lambda: None, ValidationConfig(lambda _: {"score": 1})).fit()
    assert statuses(tmp_path) == {"a": "VALIDATED"}
    assert [metrics for _, metrics in result.best_checkpoints] == [{"step": 1, "score": 1}]


def test_a_validation_that_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="fn_kwargs must be JSON-serializable"):
        ValidationTaskConfig({"x": print})

    def loop() -> None:
        with pytest.raises(ValueError, match="validation needs a checkpoint"):
            train.report({}, validation=True)
        train.report({}, save(tmp_path / "local", "x"), validation=True)

    with pytest.raises(train.WorkerGroupError, match=r"pass validation_config=ValidationConfig"):
        trainer(tmp_path, loop, None).fit()
