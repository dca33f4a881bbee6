"""Checkpoints in a bucket: real ranks, and moto's server, which speaks S3."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from moto.server import ThreadedMotoServer

from distributor import DistributorError, TorchDistributor, train
from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    RunConfig,
    ScalingConfig,
)
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import CHECKPOINT_LOG, MANIFEST, Manifest
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-too",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server; give its host and port."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def runs(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make an empty bucket; give the address of a folder in it."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    ask(server, "/moto-api/reset", "POST")
    ask(server, "/bucket", "PUT")
    return f"s3://bucket/deep/runs?endpoint_override={server}&scheme=http"


def ask(server: str, path: str, method: str, body: str = "") -> None:
    request = urllib.request.Request(
        f"http://{server}{path}", body.encode(), {"Content-Type": "text/plain"}, method=method
    )
    urllib.request.urlopen(request, timeout=60).close()


def save(folder: Path, text: str) -> Checkpoint:
    """Save what this rank has: a shard, and an empty file in a folder below."""
    rank = train.get_context().get_world_rank()
    mine = folder / f"of rank {rank}"
    (mine / "deep").mkdir(parents=True, exist_ok=True)
    (mine / f"{rank}.txt").write_text(text)
    (mine / "deep" / f"{rank}.empty").touch()
    return Checkpoint.from_directory(mine)


def loaded(checkpoint: Checkpoint) -> tuple[str, Path]:
    """Read this rank's shard; tell where it was brought to."""
    rank = train.get_context().get_world_rank()
    with checkpoint.as_directory() as folder:
        text = Path(folder, f"{rank}.txt").read_text()
        assert Path(folder, "deep", f"{rank}.empty").stat().st_size == 0
    return text, Path(folder)


def go_on(folder: Path, until: int, mode: str = "SYNC") -> dict[str, Any]:
    """Count from where the latest checkpoint ends, and report at each step."""
    before = train.get_checkpoint()
    begin, brought = loaded(before) if before else ("0", None)
    for step in range(int(begin), until):
        train.report(
            {"step": step},
            checkpoint=save(folder / str(step), str(step + 1)),
            checkpoint_upload_mode=CheckpointUploadMode(mode),
        )
    # All have reported, and so have left the folder that they shared.
    there = brought is not None and brought.exists()
    return {"from": before and before.path, "begin": int(begin), "there": there}


def on_two(runs: str, **settings: Any) -> TorchDistributor:
    where = {"storage_path": runs, "name": "mine", "timeout": 120, **settings}
    return TorchDistributor(2, use_gpu=False, **where)


def test_what_ranks_report_is_there_for_the_next_run(
    runs: str, distribute: Distribute, tmp_path: Path
) -> None:
    """On a cluster too, whose executors have no credentials but those of the run."""
    ranks = distribute(2, storage_path=runs, name="mine", env=KEYS)
    ranks.run(go_on, tmp_path, 2)

    told = ranks.run_all(go_on, tmp_path, 3)

    path = "bucket/deep/runs/mine/checkpoint_000001"
    assert told == [{"from": path, "begin": 2, "there": False}] * 2
    storage = Storage(runs, "mine")
    found = storage.committed()
    assert [manifest.metrics["step"] for _, manifest in found] == [0, 1, 2]
    assert [storage.find_damage(name, each.files) for name, each in found] == [None] * 3
    assert {file.name: file.size for file in found[0][1].files if file.name != CHECKPOINT_LOG} == {
        "0.txt": 1,
        "1.txt": 1,
        "deep/0.empty": 0,
        "deep/1.empty": 0,
    }


def test_what_is_reported_in_the_background_is_there_at_the_end(runs: str, tmp_path: Path) -> None:
    on_two(runs).run(go_on, tmp_path, 3, "ASYNC")
    found = Storage(runs, "mine").committed()
    assert [manifest.metrics["step"] for _, manifest in found] == [0, 1, 2]


def test_a_trainer_keeps_as_many_as_it_was_told(runs: str, tmp_path: Path) -> None:
    told = TorchTrainer(
        lambda: go_on(tmp_path, 4),
        scaling_config=ScalingConfig(num_workers=2, local_mode=True),
        run_config=RunConfig(
            storage_path=runs, name="mine", checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    ).fit()

    kept = [checkpoint.path for checkpoint, _ in told.best_checkpoints]
    assert kept == [f"bucket/deep/runs/mine/checkpoint_00000{step}" for step in (2, 3)]
    assert [report.metrics["step"] for report in told.reports] == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at bucket/deep/runs/mine"):
        Storage(runs, "mine").checkpoint("checkpoint_000000").to_directory(tmp_path / "copy")


def test_what_was_never_committed_is_not_loaded(runs: str, tmp_path: Path) -> None:
    storage = Storage(runs, "mine")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "0.txt").write_text("5")
    storage.upload(tmp_path / "killed", "checkpoint_000004")

    assert on_two(runs).run(go_on, tmp_path, 1)["from"] is None
    assert [name for name, _ in storage.committed()] == ["checkpoint_000005"]
    assert storage.find_uncommitted("checkpoint_000009") == [], (
        "it is removed once there is a whole one"
    )


def test_what_is_damaged_is_passed_over(
    runs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_two(runs).run(go_on, tmp_path, 2)
    storage = Storage(runs, "mine")
    with storage.filesystem.open_output_stream(f"{storage.path}/checkpoint_000001/1.txt") as file:
        file.write(b"9")

    assert on_two(runs).run(go_on, tmp_path, 2)["begin"] == 1
    assert "checkpoint_000001/1.txt has been modified." in capsys.readouterr().out


def test_a_manifest_that_was_cut_short_is_none(runs: str, tmp_path: Path) -> None:
    on_two(runs).run(go_on, tmp_path, 1)
    storage = Storage(runs, "mine")
    with storage.filesystem.open_output_stream(
        f"{storage.path}/checkpoint_000000/{MANIFEST}"
    ) as file:
        file.write(b'{"index":')
    assert storage.committed() == []


def test_metadata_can_be_added_to_what_is_in_a_bucket(runs: str, tmp_path: Path) -> None:
    storage = Storage(runs, "mine")
    (tmp_path / "model.pt").write_text("weights")
    files = storage.upload(tmp_path, "best")
    storage.commit("best", Manifest(index=0, world_size=1, files=tuple(files)))
    checkpoint = Checkpoint(runs.replace("?", "/mine/best?"))

    checkpoint.set_metadata({"epoch": 3})
    checkpoint.update_metadata({"step": 7})

    assert checkpoint == storage.checkpoint("best")
    assert checkpoint.get_metadata() == {"epoch": 3, "step": 7}
    assert (Path(checkpoint.to_directory()) / "model.pt").read_text() == "weights"


def test_a_bucket_that_is_not_there_is_told(runs: str) -> None:
    ranks = on_two(runs.replace("bucket", "nowhere"))
    with pytest.raises(DistributorError, match=r"rank 0 on .*nowhere"):
        ranks.run(lambda: train.report({"loss": 1.0}))


def test_rights_to_the_runs_own_folder_are_enough(runs: str, server: str, tmp_path: Path) -> None:
    keys = rights(server, {"s3:*": "bucket/deep/runs/mine/*", "s3:ListBucket": "bucket"})
    try:
        ask(server, "/moto-api/reset-auth", "POST", "0")
        on_two(runs, env=keys).run(go_on, tmp_path, 1)
        with pytest.raises(DistributorError, match=r"rank 0 on .*ACCESS_DENIED"):
            on_two(runs, env=keys, name="another").run(go_on, tmp_path, 1)
        with pytest.raises(OSError, match="When listing objects"):
            TorchTrainer(print, run_config=RunConfig(storage_path=runs))
    finally:
        ask(server, "/moto-api/reset-auth", "POST", "inf")


def rights(server: str, allowed: dict[str, str]) -> dict[str, str]:
    """Make somebody who may do this and no more; give the variables with their keys."""
    import boto3

    iam = boto3.client("iam", endpoint_url=f"http://{server}")
    iam.create_user(UserName="somebody")
    key = iam.create_access_key(UserName="somebody")["AccessKey"]
    statements = [
        {"Effect": "Allow", "Action": action, "Resource": f"arn:aws:s3:::{resource}"}
        for action, resource in allowed.items()
    ]
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam.put_user_policy(UserName="somebody", PolicyName="some", PolicyDocument=policy)
    return {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }
