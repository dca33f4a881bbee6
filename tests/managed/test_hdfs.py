"""HDFS as storage, on any YARN cluster of which it is the default file system."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pyarrow.fs as pafs
import pytest
from support.managed import ManagedSession, manager, properties_of_hadoop, why_missing

from distributor.filesystems import HDFS, resolve
from distributor.train import Result

WHY = why_missing("yarn")
if not WHY and not properties_of_hadoop("core-site.xml").get("fs.defaultFS", "").startswith(HDFS):
    WHY = "HDFS is not the default file system of the cluster"
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.skipif(bool(WHY), reason=WHY)]

TRAINING = """
from distributor import train
from distributor.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from distributor.train.torch import TorchTrainer

def loop(config):
    import os, signal, tempfile
    from pathlib import Path
    from distributor import train
    rank, first = train.get_context().get_world_rank(), 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, str(rank)).read_text()) + 1
    for step in range(first, config["steps"]):
        if step == config.get("killed_at") and not first and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, str(rank)).write_text(str(step))
            report = {"step": step, "first": first}
            train.report(report, checkpoint=train.Checkpoint(folder))

def fit(runs, callback=None, **config):
    return TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False, local_mode=False),
        run_config=RunConfig(
            name="run",
            storage_path=runs,
            failure_config=FailureConfig(max_failures=config.get("max_failures", 0)),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[callback] if callback else None,
        ),
    ).fit()
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedSession]:
    with manager("yarn", tmp_path_factory.mktemp("hdfs")).session() as session:
        yield session


@pytest.fixture
def folder() -> Iterator[str]:
    """Return the address of a new folder, and remove it at the end."""
    address = f"hdfs:///tmp/distributor-tests-{secrets.token_hex(4)}"
    filesystem, inside = resolve(address)
    filesystem.create_dir(inside)
    yield address
    filesystem.delete_dir(inside)


def test_checkpoints(session: ManagedSession, folder: str) -> None:
    session.run(f"{TRAINING}\nfit(folder, steps=4, killed_at=2, max_failures=1)", folder=folder)
    found = Result.from_path(f"{folder}/run")
    assert [report.metrics["step"] for report in found.reports] == [0, 1, 2, 3]
    assert found.metrics == {"step": 3, "first": 2}, "it resumed from the checkpoint of step 1"
    assert found.best_checkpoints is not None
    assert [metrics["step"] for _, metrics in found.best_checkpoints] == [2, 3]
    assert len(found.filesystem.get_file_info(pafs.FileSelector(found.path))) == 3, "with the log"
