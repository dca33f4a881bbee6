"""Errors before ranks run, on a cluster whose machines do not match."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cluster import cluster_on
from support.machines import machines_apart, why_not_apart

from distributor.node.node import REACH_SECONDS

WHY_NOT = why_not_apart()
pytestmark = pytest.mark.spark
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

PROGRAM = """
def train():
    import os
    return int(os.environ["WORLD_SIZE"])

def ending_of(distributor):
    try:
        return {"value": distributor.run(train)}
    except BaseException as error:
        return {"error": type(error).__name__, "message": str(error)}

send(ending=ending_of(TorchDistributor(2, local_mode=False, use_gpu=False)))
"""


@pytest.mark.slow
@needs_namespaces
def test_nodes_with_other_versions_are_named(tmp_path: Path) -> None:
    another = tmp_path / "torch-2.4.0.dist-info"
    another.mkdir()
    (another / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n")
    with machines_apart(4) as machines:
        *_, one, other = machines
        other.environment["PYTHONPATH"] = str(tmp_path)
        with cluster_on(machines, tmp_path) as cluster, cluster.driver(PROGRAM) as driver:
            ending = driver.receive("ending")["ending"]

    assert ending["error"] == "ExecutorNotReady", ending
    assert "differ in torch" in ending["message"]
    assert f"{torch.__version__} on {one.address}" in ending["message"]
    assert f"2.4.0 on {other.address}" in ending["message"]


@pytest.mark.slow
@needs_namespaces
def test_an_executor_that_cannot_reach_the_first_is_named(tmp_path: Path) -> None:
    with machines_apart(4) as machines, cluster_on(machines, tmp_path) as cluster:
        one, other = cluster.on_workers
        one.lose(other)
        other.lose(one)
        with cluster.driver(PROGRAM) as driver:
            ending = driver.receive("ending", REACH_SECONDS + 180)["ending"]

    assert ending["error"] == "ExecutorNotReady", ending
    ways = [(one.address, other.address), (other.address, one.address)]
    found = [f"on {here} cannot reach rank 0's at {there}" for here, there in ways]
    assert any(text in ending["message"] for text in found), ending
