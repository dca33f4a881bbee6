"""Old checkpoints are removed: all but the best and the latest."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

from distributor.core.rank_variables import CheckpointSettings
from distributor.train.storage.checkpoint_manager import select_removable
from distributor.train.storage.files import Manifest

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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
