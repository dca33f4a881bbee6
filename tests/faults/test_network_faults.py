"""Runs on a cluster whose links are slow, or lose what is sent to the driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, cluster_on
from support.machines import machines_apart, why_not_apart
from support.waiting import DEADLINE, assert_gone, until

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WHY_NOT = why_not_apart()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Start a cluster of two workers of one core each; the test changes its network."""
    with machines_apart(4) as machines, cluster_on(machines, tmp_path) as cluster:
        yield cluster


UNREACHABLE_HUB = """
class Broken(Exception):
    pass

def train():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(2**20)
    dist.all_reduce(total)
    print("hello of", os.environ["SPARK_LOCAL_IP"])
    return total.sum().item(), os.environ["SPARK_LOCAL_IP"], os.environ["RANK"] * 2**20

def fail():
    if os.environ["SPARK_LOCAL_IP"] == {broken!r}:
        raise Broken("no", 3)
    threading.Event().wait()

runner = TorchDistributor(2, local_mode=False, use_gpu=False, hub_address={hub!r}, log_dir={logs!r})
send(values=[[total, host, len(large)] for total, host, large in runner.run_all(train)])
try:
    runner.run(fail)
except Broken as error:
    send(broken=error.args, remote=str(error.__cause__), hosts=[
        failure.origin.host for failure in error.rank_failures.values()])
"""


@needs_namespaces
def test_nodes_that_cannot_reach_the_hub_do_their_work(cluster: Cluster, tmp_path: Path) -> None:
    hub, logs = cluster.on_driver.also_elsewhere(), tmp_path / "logs"
    both = [machine.address for machine in cluster.on_workers]
    cluster.on_workers[0].lose(hub)
    source = UNREACHABLE_HUB.format(broken=both[0], hub=hub.address, logs=str(logs))
    with cluster.driver(source) as driver:
        values = driver.receive("values")["values"]
        shown = driver.log.read_text()
        report = driver.receive("broken")

    assert sorted(values) == [[2.0 * 2**20, host, 2**20] for host in sorted(both)]
    assert report["broken"] == ["no", 3]
    assert 'raise Broken("no", 3)' in report["remote"]
    assert report["hosts"] == both[:1]
    assert shown.count("did not reach this process") == 1
    assert "hello of" not in shown, "the run goes on without links"
    printed = [file.read_text() for file in logs.glob("*/attempt_0/rank*.stdout")]
    assert sorted(filter(None, printed)) == [f"hello of {host}\n" for host in sorted(both)]


IGNORES_SIGTERM = """
def wait_in_vain(folder):
    open(os.path.join(folder, str(os.getpid())), "x").close()
    threading.Event().wait()

try:
    TorchDistributor(2, local_mode=False, use_gpu=False, hub_address={hub!r}, timeout=12).run(
        wait_in_vain, {folder!r})
except BaseException as error:
    send(error=type(error).__name__, message=str(error),
         ranks=sorted(getattr(error, "stacks", {{}})))
"""


@needs_namespaces
def test_a_timeout_holds_if_the_drivers_port_is_blocked(cluster: Cluster, tmp_path: Path) -> None:
    hub, ranks = cluster.on_driver.also_elsewhere(), tmp_path / "ranks"
    ranks.mkdir()
    cluster.on_workers[0].lose(hub)
    with cluster.driver(IGNORES_SIGTERM.format(hub=hub.address, folder=str(ranks))) as driver:
        until(
            lambda: "Started distributed training" in driver.log.read_text(),
            "the driver reports that the ranks have started",
            DEADLINE,
        )
        shown = driver.log.read_text()
        report = driver.receive("error", DEADLINE)

    assert shown.count("did not reach this process") == 1, "at the start, not at the end"
    assert report["error"] == "RunTimeout", report
    assert "in wait_in_vain" in report["message"]
    assert report["ranks"]
    assert_gone(int(rank.name) for rank in ranks.iterdir())
