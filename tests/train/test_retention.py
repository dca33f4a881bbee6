"""Old checkpoints are removed: all but the best and the latest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.reports import save

from distributor import TorchDistributor, train
from distributor.core.checkpoint_config import CheckpointSettings
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import Manifest
from distributor.train.storage.retention import select_removable

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_reports_continue_if_an_old_checkpoint_cannot_be_removed(tmp_path: Path) -> None:
    def report() -> int:
        def fail(self: Storage, checkpoint: str) -> None:
            raise PermissionError("not yours")

        Storage.remove = fail  # type: ignore[method-assign]
        for step in range(3):
            train.report({"step": step}, checkpoint=save(tmp_path / str(step), "x"))
        return len(train.get_all_reported_checkpoints())

    env = CheckpointSettings(storage_path=str(tmp_path), name="mine", num_to_keep=1).to_variable()
    assert TorchDistributor(1, use_gpu=False, env=env).run(report) == 3


KEPT = [
    (None, None, "max", "0123"),
    (2, None, "max", "3"),
    (2, "accuracy", "max", "12"),
    (2, "accuracy", "min", "03"),
    (3, "unknown", "max", "23"),
]


@pytest.mark.parametrize(("keep", "attribute", "order", "kept"), KEPT)
def test_the_best_and_the_latest_checkpoints_are_kept(
    keep: Any, attribute: Any, order: Any, kept: str
) -> None:
    scores = [0.1, 0.9, 0.5, 0.3]
    committed = [
        (
            f"checkpoint_{index:06d}",
            Manifest(index=index, metrics={"accuracy": score}, world_size=1, files=()),
        )
        for index, score in enumerate(scores)
    ]
    named = ("full_model", Manifest(index=4, metrics={}, world_size=1, files=()))
    checkpoint_settings = CheckpointSettings(
        storage_path="x", name="x", num_to_keep=keep, score_attribute=attribute, score_order=order
    )
    removable = select_removable([*committed, named], checkpoint_settings)
    left = [name[-1] for name, _ in committed if name not in removable]
    assert "".join(left) == kept
    assert "full_model" not in removable, "it is the latest"
