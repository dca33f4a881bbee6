"""The log of a run's reports: complete after any end, and each report is written a few times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from support.plain import plain

from distributor.core.rank_variables import CheckpointSettings
from distributor.train.storage import checkpoint_manager
from distributor.train.storage.checkpoint_manager import CheckpointManager, Report, read_reports
from distributor.train.storage.checkpoint_store import Storage

EVERY = 3
"""Reports for each one with a checkpoint."""


@pytest.fixture(params=["local", "plain"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return a storage with all operations of local files, or with plain writes only."""
    files = plain(pafs.LocalFileSystem()) if request.param == "plain" else None
    return Storage(tmp_path, "run", files)


def manager_of(storage: Storage) -> CheckpointManager:
    settings = CheckpointSettings(storage_path="", name="", num_to_keep=2)
    return CheckpointManager(storage, settings)


def name_of(index: int) -> str:
    return f"checkpoint_{index:06d}"


def add(manager: CheckpointManager, number: int, loss: float = 0.0) -> None:
    saves = number % EVERY == EVERY - 1
    index = number // EVERY
    part: dict[str, Any] = {
        "files": [] if saves else None,
        "positions": {},
        "validation": None,
        "other versions": [],
    }
    report = Report(
        number=number,
        metrics={"loss": loss},
        checkpoint=name_of(index) if saves else None,
        world_size=1,
        attempt=0,
    )
    manager.add(report, index, [part])


def test_a_new_attempt_continues_the_log_of_its_checkpoint(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_manager, "SEGMENT_BYTES", 500)
    manager = manager_of(storage)
    for number in range(50):  # and is killed
        add(manager, number, loss=1.0)
    for latest, loss in ((15, 2.0), (14, 3.0)):  # the latest is damaged, which is found later
        manager = manager_of(storage)
        storage.uncommit(name_of(latest + 1))
        count = manager.resume_from(name_of(latest))
        assert count == EVERY * (latest + 1)
        for number in range(count, count + 2):
            add(manager, number, loss=loss)
        manager.finish()
    since_checkpoint = [3.0] * 2 if storage.filesystem.type_name == "local" else []
    found = read_reports(storage)
    assert [report.metrics["loss"] for report in found] == [1.0] * 45 + since_checkpoint
    assert [report.number for report in found] == list(range(len(found)))
