"""Runs on a cluster whose links are slow, or lose what is sent to the driver."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import facts_in
from support.cluster import DEADLINE, Cluster, cluster_on
from support.machines import machines_apart, why_not_apart
from support.two_machines import NOTICED
from support.waiting import assert_gone, until

pytestmark = pytest.mark.spark

WHY_NOT = why_not_apart()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Start a cluster of two workers of one core each; the test changes its network."""
    with machines_apart(4) as machines, cluster_on(machines, tmp_path) as cluster:
        yield cluster


LONG_TRAINING = """
def train(weights, seconds):
    import time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    end, steps, go_on = time.monotonic() + seconds, 0, torch.ones(1)
    while go_on:
        steps += 1
        print("step", steps)
        go_on = torch.tensor([float(time.monotonic() < end)])
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
    return weights * (dist.get_rank() + 1), steps

import torch
weights = torch.arange(2.0 * 2**20)
runner = TorchDistributor(2, local_mode=False, use_gpu=False)
(first, steps), (second, others_steps) = runner.run_all(train, weights, {seconds})
send(whole=torch.equal(first, weights) and torch.equal(second, weights * 2),
     steps=[steps, others_steps])
"""


@pytest.mark.slow
@needs_namespaces
def test_a_slow_node_is_not_taken_for_a_lost_one(cluster: Cluster) -> None:
    cluster.on_workers[0].slow(200)
    with cluster.driver(LONG_TRAINING.format(seconds=NOTICED)) as driver:
        report = driver.receive("whole", DEADLINE)
        shown = driver.log.read_text().splitlines()

    assert report["whole"]
    steps, others_steps = report["steps"]
    assert 1 < steps == others_steps < NOTICED / 0.2, "each step waits for the slow node"
    for rank in range(2):
        lines = [line for line in shown if line.startswith(f"[{rank}] step ")]
        assert lines == [f"[{rank}] step {step + 1}" for step in range(steps)]


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


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("count", [1, 2])
def test_nodes_that_cannot_reach_the_hub_do_their_work(
    cluster: Cluster, tmp_path: Path, count: int
) -> None:
    hub, logs = cluster.on_driver.also_elsewhere(), tmp_path / "logs"
    both = [machine.address for machine in cluster.on_workers]
    cut_off = both[:count]
    for machine in cluster.on_workers[:count]:
        machine.lose(hub)
    source = UNREACHABLE_HUB.format(broken=cut_off[0], hub=hub.address, logs=str(logs))
    with cluster.driver(source) as driver:
        values = driver.receive("values")["values"]
        shown = driver.log.read_text()
        report = driver.receive("broken")

    assert sorted(values) == [[2.0 * 2**20, host, 2**20] for host in sorted(both)]
    assert report["broken"] == ["no", 3]
    assert 'raise Broken("no", 3)' in report["remote"]
    assert report["hosts"] == cut_off[:1]
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


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("count", [1, 2])
def test_a_timeout_holds_if_the_drivers_port_is_blocked(
    cluster: Cluster, tmp_path: Path, count: int
) -> None:
    hub, ranks = cluster.on_driver.also_elsewhere(), tmp_path / "ranks"
    ranks.mkdir()
    for machine in cluster.on_workers[:count]:
        machine.lose(hub)
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


SLOW_PYTHON = """
import json, logging, time
from unittest import mock
from pyspark.sql import SparkSession
from distributor import TorchDistributor
from distributor.launchers.spark import launcher
from distributor.launchers.spark.hub_address import HubAddress

class Warnings(logging.Handler):
    def emit(self, record):
        found.append([time.monotonic() - began, record.getMessage()])

def stay(seconds):
    time.sleep(seconds)

builder = SparkSession.builder.master("local-cluster[2,1,1024]")
spark = builder.config("spark.ui.enabled", "false").config("spark.log.level", "OFF").getOrCreate()
logging.getLogger("distributor").addHandler(Warnings(logging.WARNING))
runner = TorchDistributor(2, local_mode=False, use_gpu=False)

found, began = [], time.monotonic()
runner.run(stay, 0)
late, took = found, time.monotonic() - began
# Nothing listens at this address of the same machine.
without_nodes = HubAddress(bound="127.0.0.1", advertised="127.0.0.2")
found, began = [], time.monotonic()
with mock.patch.object(launcher, "choose_hub_address", return_value=without_nodes):
    runner.run(stay, 20)
print("FACTS " + json.dumps({"late": late, "took": took, "cut_off": found}))
"""


@pytest.mark.slow
def test_only_nodes_that_failed_to_connect_are_reported(
    run_driver: Callable[..., subprocess.CompletedProcess[str]],
    python_that_begins_with: Callable[[str], Path],
) -> None:
    python = python_that_begins_with("import time; time.sleep(20)")

    done = run_driver(SLOW_PYTHON, env={"PYSPARK_PYTHON": str(python)})

    facts = facts_in(done)
    assert facts["took"] > 20, "the executors' Python started late"
    assert facts["late"] == []
    [[seconds, warning]] = facts["cut_off"]
    assert "Nodes 0, 1 did not reach this process" in warning
    assert seconds < 20, "while the ranks run"
