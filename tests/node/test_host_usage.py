"""System metrics of a node are read without psutil, which a Spark executor may lack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import facts_in

from distributor.core import resources
from distributor.node.agent import host_usage

RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_figures_are_those_of_psutil() -> None:
    before = psutil.cpu_times(), psutil.net_io_counters()
    usage = host_usage.read_host_usage()
    after = psutil.cpu_times(), psutil.net_io_counters()

    idle = 1 - usage.cpu_busy / usage.cpu_total
    low, high = sorted(idle_share(times) for times, _ in (before, after))
    assert low - 0.01 < idle < high + 0.01
    memory = psutil.virtual_memory()
    assert usage.memory_percent == pytest.approx(memory.percent, abs=5)
    assert usage.memory_used == pytest.approx(memory.used, rel=0.1)
    assert usage.network is not None
    received, sent = usage.network
    assert before[1].bytes_recv <= received <= after[1].bytes_recv
    assert before[1].bytes_sent <= sent <= after[1].bytes_sent


def idle_share(times: Any) -> float:
    return float((times.idle + times.iowait) / (sum(times) - times.guest - times.guest_nice))


def test_a_container_without_network_interfaces_has_no_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_usage, "PROC", tmp_path)
    monkeypatch.setattr(resources, "PROC", tmp_path)
    (tmp_path / "net").mkdir()
    (tmp_path / "stat").write_text("cpu  10 1 5 70 4 1 2 7 3 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n")
    (tmp_path / "net/dev").write_text("Inter-|   Receive\n face |bytes\n")

    assert host_usage.read_host_usage() == host_usage.HostUsage(
        cpu_busy=26, cpu_total=100, memory_used=400 * 1024, memory_percent=40, network=None
    )


RECORDED = """
import json, sys, mlflow
from distributor import TorchDistributor
from distributor.node.agent import system_metrics

def train(run_id):
    import mlflow, time
    try:
        import psutil
    except ImportError:
        psutil = None
    deadline = time.monotonic() + 90
    while not mlflow.get_run(run_id).data.metrics and time.monotonic() < deadline:
        time.sleep(0.1)
    return psutil is None

if __name__ == "__main__":
    system_metrics.SAMPLE_INTERVAL = 0.2  # on this machine
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    cluster = sys.argv[1] == "cluster"
    if cluster:
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.master("local-cluster[1,1,1024]").getOrCreate()
    runner = TorchDistributor(1, local_mode=not cluster, use_gpu=False, timeout=120)
    with mlflow.start_run() as run:
        lacks_psutil = runner.run(train, run.info.run_id)
    metrics = mlflow.get_run(run.info.run_id).data.metrics
    print("FACTS " + json.dumps([lacks_psutil, metrics]))
"""


def test_usage_is_read_without_psutil() -> None:
    program = (
        "import sys; sys.modules['psutil'] = None\n"
        "from distributor.node.agent import system_metrics\n"
        "from distributor.node.agent.host_usage import read_host_usage\n"
        "print(read_host_usage().memory_used)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) > 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local", pytest.param("cluster", marks=pytest.mark.spark)])
def test_a_node_without_psutil_records_its_usage(
    run_driver: RunDriver, python_that_begins_with: Callable[[str], Path], mode: str
) -> None:
    pytest.importorskip("mlflow")
    python = python_that_begins_with("import sys; sys.modules['psutil'] = None")
    env = {"PYSPARK_PYTHON": str(python)} if mode == "cluster" else {}
    env |= {"PYTHONPATH": str(python.parent)} if mode == "local" else {}
    lacks_psutil, metrics = facts_in(run_driver(RECORDED, mode, env=env))

    assert lacks_psutil
    assert {name.rpartition("/")[2] for name in metrics} >= {
        "cpu_utilization_percentage",
        "system_memory_usage_megabytes",
        "system_memory_usage_percentage",
        "network_receive_megabytes",
        "network_transmit_megabytes",
    }
