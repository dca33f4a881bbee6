"""`distributor.doctor` on machines of which one has a slow link, which is not mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cluster import cluster_on
from support.doctor import examined
from support.machines import machines_apart, why_not_apart

NOT_APART = why_not_apart()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.spark,
    pytest.mark.skipif(bool(NOT_APART), reason=NOT_APART),
]


def test_a_slow_link(tmp_path: Path) -> None:
    with machines_apart(4) as machines, cluster_on(machines, tmp_path) as cluster:
        cluster.on_workers[0].slow(30)
        found = examined(cluster)

    slow = cluster.on_workers[0].address
    assert found.having("failure") == {}, found.text
    assert f"{slow} to the driver: " in found.having("warning")["network speed"]["found"]
    assert "GLOO_SOCKET_IFNAME" in found.having("warning")["network speed"]["fix"]
