"""Ports that an administrator can open a firewall for."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from distributor import TorchDistributor


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def meets_the_other(address: str, port: int) -> str:
    """Return once the rank of another run has come too, so that both runs go on at once."""
    import socket

    with socket.create_connection((address, port), 60) as meeting:
        print("here", flush=True)
        return meeting.recv(10).decode()


@pytest.mark.spark
def test_two_runs_at_once_share_a_fixed_hub_port(
    spark: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    host, port = spark.conf.get("spark.driver.host"), free_port()
    runner = TorchDistributor(
        1, local_mode=False, use_gpu=False, hub_address=f"{host}:{port}", timeout=120
    )
    with socket.create_server((host, 0)) as meeting:
        meeting.settimeout(120)
        runs = [runner.submit(meets_the_other, host, meeting.getsockname()[1]) for _ in range(2)]
        ranks = [meeting.accept()[0] for _ in runs]
        for number, rank in enumerate(ranks):
            with rank:
                rank.sendall(f"run {number}".encode())
        assert sorted(run.result(120) for run in runs) == ["run 0", "run 1"]
    assert capfd.readouterr().out.count("[0] here") == 2, "both have a link"
    with socket.socket() as probe:
        assert probe.connect_ex((host, port)), "the port is closed after the last run"
