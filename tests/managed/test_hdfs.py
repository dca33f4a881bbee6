"""HDFS as storage, on any YARN cluster of which it is the default file system."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pyarrow.fs as pafs
import pytest
from support.managed import Failed, ManagedSession, manager, properties_of_hadoop, why_missing

from distributor.filesystems import HDFS, resolve_address
from distributor.train import Result

WHY = why_missing("yarn")
if not WHY and not properties_of_hadoop("core-site.xml").get("fs.defaultFS", "").startswith(HDFS):
    WHY = "HDFS is not the default file system of the cluster"
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.skipif(bool(WHY), reason=WHY)]
MEGABYTE = 1024 * 1024

TRAINING = """
from distributor import train
from distributor.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from distributor.train import ValidationConfig
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
            train.report(
                {"step": step, "first": first},
                checkpoint=train.Checkpoint(folder),
                validation=step == 0,
            )

def validate(checkpoint):
    import os
    with checkpoint.as_directory() as folder:
        return {"files": len([name for name in os.listdir(folder) if name.isdigit()])}

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
        validation_config=ValidationConfig(validate),
    ).fit()
"""
QUOTA = f"""
{TRAINING}

def set_quota(quota):
    path = spark._jvm.org.apache.hadoop.fs.Path(folder)
    unchanged = spark._jvm.org.apache.hadoop.hdfs.protocol.HdfsConstants.QUOTA_DONT_SET
    path.getFileSystem(spark._jsc.hadoopConfiguration()).setQuota(path, unchanged, quota)

class Fills(train.UserCallback):
    def after_report(self, **report):
        set_quota({MEGABYTE})
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedSession]:
    with manager("yarn", tmp_path_factory.mktemp("hdfs")).session() as session:
        yield session


@pytest.fixture
def folder() -> Iterator[str]:
    """Return the address of a new folder, and remove it at the end."""
    address = f"hdfs:///tmp/distributor-tests-{secrets.token_hex(4)}"
    filesystem, inside = resolve_address(address)
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


def test_a_checkpoint_is_validated(session: ManagedSession, folder: str) -> None:
    session.run(f"{TRAINING}\nfit(folder, steps=1)", folder=folder)
    assert Result.from_path(f"{folder}/run").metrics == {"step": 0, "first": 0, "files": 2}


def test_a_full_quota(session: ManagedSession, folder: str) -> None:
    try:
        session.run(f"{QUOTA}\nset_quota(-1)", folder=folder)
    except Failed as failed:
        if "uperuser privilege is required" not in failed.message:
            raise
        pytest.skip("only a superuser of HDFS can set a quota")
    inside = resolve_address(folder)[1]
    reason = f"quota of {inside} is exceeded: quota = {MEGABYTE} B"
    at_first = f"Rank 0 on .* cannot write to {inside}/run: .*{reason}"
    later = f"(upload its checkpoint to|be stored in) {inside}/run: .*{reason}"
    for text, callback in ((later, "Fills()"), (at_first, "None")):
        with pytest.raises(Failed, match=text) as caught:
            session.run(f"{QUOTA}\nfit(folder, {callback}, steps=100)", folder=folder)
        assert caught.value.kind == "WorkerGroupError", caught.value
        assert "org.apache.hadoop.hdfs.server" not in caught.value.message, "the stack in Java"
    saved = len(Result.from_path(f"{folder}/run").reports)
    assert saved > 0
    session.run(f"{QUOTA}\nset_quota(-1)\nfit(folder, steps={saved + 1})", folder=folder)
    assert Result.from_path(f"{folder}/run").metrics == {"step": saved, "first": saved}


def test_parquet(session: ManagedSession, folder: str) -> None:
    counts = session.run(
        """
        spark.range(1000).repartition(3).write.parquet(f"{folder}/rows")

        def count(path):
            from distributor.data import from_parquet
            shard = from_parquet(path)
            return sum(len(batch["id"]) for batch in shard.iter_torch_batches(batch_size=64))

        result = ranks(2).run_all(count, f"{folder}/rows")
        """,
        folder=folder,
    )
    assert counts == [500, 500]
