"""What a node of the run finds out before its ranks start."""

from __future__ import annotations

import socket
import time

import pytest

from distributor.errors import ExecutorNotReady
from distributor.node.spark_task import task
from distributor.wire.messages import Rendezvous


def test_the_way_to_a_store_that_listens_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        task._check_way(Rendezvous("127.0.0.1", store.getsockname()[1]))
        connection, _ = store.accept()
        with connection:
            assert connection.recv(1) == b"", "it says nothing"


def test_a_refusal_is_told_only_after_rank_0_had_time_to_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task, "REACH_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
    began = time.monotonic()

    with pytest.raises(ExecutorNotReady, match=f"cannot reach rank 0's at 127.0.0.1:{port}"):
        task._check_way(Rendezvous("127.0.0.1", port))

    assert time.monotonic() - began >= 0.3
