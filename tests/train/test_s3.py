"""Checkpoints in an S3 bucket, with real ranks and the server of moto."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.reports import find_damage

from distributor import DistributorError, TorchDistributor, train
from distributor.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    RunConfig,
    ScalingConfig,
)
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import CHECKPOINT_LOG
from distributor.train.torch import TorchTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-too",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server, and return its host and port."""
    pytest.importorskip("moto")
    from moto.server import ThreadedMotoServer  # not in each process that collects the tests

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def runs(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create an empty bucket, and return the URI of a folder in it."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    send_request(server, "/moto-api/reset", "POST")
    send_request(server, "/bucket", "PUT")
    return f"s3://bucket/deep/runs?endpoint_override={server}&scheme=http"


def send_request(server: str, path: str, method: str, body: str = "") -> None:
    request = urllib.request.Request(
        f"http://{server}{path}", body.encode(), {"Content-Type": "text/plain"}, method=method
    )
    urllib.request.urlopen(request, timeout=60).close()


def save(folder: Path, text: str) -> Checkpoint:
    """Save this rank's files: a shard, and an empty file in a subfolder."""
    rank = train.get_context().get_world_rank()
    mine = folder / f"of rank {rank}"
    (mine / "deep").mkdir(parents=True, exist_ok=True)
    (mine / f"{rank}.txt").write_text(text)
    (mine / "deep" / f"{rank}.empty").touch()
    return Checkpoint.from_directory(mine)


def load(checkpoint: Checkpoint) -> tuple[str, Path]:
    """Return the text of this rank's shard, and the folder to which it was downloaded."""
    rank = train.get_context().get_world_rank()
    with checkpoint.as_directory() as folder:
        text = Path(folder, f"{rank}.txt").read_text()
        assert Path(folder, "deep", f"{rank}.empty").stat().st_size == 0
    return text, Path(folder)


def count(folder: Path, stop: int, mode: str = "SYNC") -> dict[str, Any]:
    """Count from the step of the latest checkpoint, and report each step with a checkpoint."""
    before = train.get_checkpoint()
    start, download = load(before) if before else ("0", None)
    for step in range(int(start), stop):
        train.report(
            {"step": step},
            checkpoint=save(folder / str(step), str(step + 1)),
            checkpoint_upload_mode=CheckpointUploadMode(mode),
        )
    # All ranks have reported, and so have left the folder that they shared.
    exists = download is not None and download.exists()
    return {"from": before and before.path, "start": int(start), "download_exists": exists}


def two_ranks(runs: str, **settings: Any) -> TorchDistributor:
    settings = {"storage_path": runs, "name": "mine", "timeout": 120, **settings}
    return TorchDistributor(2, use_gpu=False, **settings)


@pytest.mark.slow
@pytest.mark.spark
def test_the_next_run_resumes_from_the_reported_checkpoint(
    runs: str, spark: Any, tmp_path: Path
) -> None:
    """On a cluster, whose executors have only the credentials that the run passes to ranks."""
    ranks = TorchDistributor(
        2, local_mode=False, use_gpu=False, storage_path=runs, name="mine", env=KEYS, timeout=120
    )
    ranks.run(count, tmp_path, 2)

    results = ranks.run_all(count, tmp_path, 3)

    path = "bucket/deep/runs/mine/checkpoint_000001"
    assert results == [{"from": path, "start": 2, "download_exists": False}] * 2
    storage = Storage(runs, "mine")
    found = storage.committed()
    assert [manifest.metrics["step"] for _, manifest in found] == [0, 1, 2]
    assert [find_damage(storage, *each) for each in found] == [None] * 3
    assert {file.name: file.size for file in found[0][1].files if file.name != CHECKPOINT_LOG} == {
        "0.txt": 1,
        "1.txt": 1,
        "deep/0.empty": 0,
        "deep/1.empty": 0,
    }


@pytest.mark.slow
def test_permissions_for_the_folder_of_the_run_are_sufficient(
    runs: str, server: str, tmp_path: Path
) -> None:
    keys = credentials(server, {"s3:*": "bucket/deep/runs/mine/*", "s3:ListBucket": "bucket"})
    try:
        send_request(server, "/moto-api/reset-auth", "POST", "0")
        two_ranks(runs, env=keys).run(count, tmp_path, 1)
        with pytest.raises(DistributorError, match=r"Rank 0 on .*ACCESS_DENIED"):
            two_ranks(runs, env=keys, name="another").run(count, tmp_path, 1)
        with pytest.raises(OSError, match="When listing objects"):
            TorchTrainer(print, run_config=RunConfig(storage_path=runs))
    finally:
        send_request(server, "/moto-api/reset-auth", "POST", "inf")


def credentials(server: str, allowed: dict[str, str]) -> dict[str, str]:
    """Create a user with these permissions only, and return environment variables with the keys."""
    import boto3

    iam = boto3.client("iam", endpoint_url=f"http://{server}")
    iam.create_user(UserName="user")
    key = iam.create_access_key(UserName="user")["AccessKey"]
    statements = [
        {"Effect": "Allow", "Action": action, "Resource": f"arn:aws:s3:::{resource}"}
        for action, resource in allowed.items()
    ]
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam.put_user_policy(UserName="user", PolicyName="some", PolicyDocument=policy)
    return {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }


def test_a_trainer_resumes_and_keeps_num_to_keep_checkpoints(runs: str, tmp_path: Path) -> None:
    def fit(stop: int) -> train.Result:
        return TorchTrainer(
            lambda: count(tmp_path, stop),
            scaling_config=ScalingConfig(num_workers=2, local_mode=True),
            run_config=RunConfig(
                storage_path=runs, name="mine", checkpoint_config=CheckpointConfig(num_to_keep=2)
            ),
        ).fit()

    fit(3)
    result = fit(4)
    assert result.return_value["start"] == 3
    kept = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
    assert kept == [f"bucket/deep/runs/mine/checkpoint_00000{step}" for step in (2, 3)]
    assert [report.metrics["step"] for report in result.reports] == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at bucket/deep/runs/mine"):
        Storage(runs, "mine").checkpoint("checkpoint_000000").to_directory(tmp_path / "copy")
