"""Checkpoints in an S3 bucket, with real ranks and the server of moto."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
from support.reports import count_on, find_damage

from distributor import train
from distributor.train import (
    CheckpointConfig,
    RunConfig,
    ScalingConfig,
)
from distributor.train.storage.checkpoint_store import Storage
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
    for path, method in (("/moto-api/reset", "POST"), ("/bucket", "PUT")):
        request = urllib.request.Request(f"http://{server}{path}", method=method)
        urllib.request.urlopen(request, timeout=60).close()
    return f"s3://bucket/deep/runs?endpoint_override={server}&scheme=http"


def test_a_trainer_resumes_and_keeps_num_to_keep_checkpoints(runs: str, tmp_path: Path) -> None:
    def fit(stop: int) -> train.Result:
        return TorchTrainer(
            lambda: count_on(tmp_path, stop),
            scaling_config=ScalingConfig(num_workers=2, local_mode=True),
            run_config=RunConfig(
                storage_path=runs, name="mine", checkpoint_config=CheckpointConfig(num_to_keep=2)
            ),
        ).fit()

    fit(3)
    result = fit(4)
    assert result.return_value == (3, "bucket/deep/runs/mine/checkpoint_000003")
    kept = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
    assert kept == [f"bucket/deep/runs/mine/checkpoint_00000{step}" for step in (2, 3)]
    assert [report.metrics["step"] for report in result.reports] == [0, 1, 2, 3]
    storage = Storage(runs, "mine")
    assert [find_damage(storage, *each) for each in storage.committed()] == [None] * 2
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at bucket/deep/runs/mine"):
        storage.checkpoint("checkpoint_000000").to_directory(tmp_path / "copy")
