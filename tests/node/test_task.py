"""What a node checks before its ranks start."""

from __future__ import annotations

import socket
import time

import pytest

from distributor.errors import ExecutorNotReady
from distributor.node import node
from distributor.node.node import check_reachable
from distributor.wire.messages import Rendezvous


def test_a_store_that_listens_is_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        check_reachable(Rendezvous("127.0.0.1", store.getsockname()[1]))
        connection, _ = store.accept()
        with connection:
            assert connection.recv(1) == b"", "the node sends nothing"


def test_a_refused_connection_is_reported_after_rank_0_had_time_to_report_its_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "REACH_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
    began = time.monotonic()

    with pytest.raises(ExecutorNotReady, match=f"cannot reach rank 0's at 127.0.0.1:{port}"):
        check_reachable(Rendezvous("127.0.0.1", port))

    assert time.monotonic() - began >= 0.3
