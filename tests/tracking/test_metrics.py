"""Metrics that ranks report and nodes measure reach the job's MLflow run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import cloudpickle
import pytest
from conftest import cluster_is_slow, facts_in
from support.tracking_server import PRELOAD, mlflow, needs_mlflow, runs_of
from support.waiting import comes_true

from distributor import TorchDistributor, runtime
from distributor.tracking.recorder import MetricsQueue

pytestmark = needs_mlflow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]


@cluster_is_slow
def test_reported_metrics_are_recorded(distribute: Distribute, experiment: str) -> None:
    def count(steps: int) -> None:
        for step in range(steps):
            runtime.progress(step, steps, loss=float(os.environ["RANK"]), step=step)

    distribute(2, preload=PRELOAD).run(count, 1500)

    [run] = runs_of(experiment)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "step")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (step, float(step)) for step in range(1500)
    ]
    assert run.data.metrics["loss"] == 0.0, "rank 0's alone"


def test_system_metrics_of_a_node_are_recorded_under_its_name(
    experiment: str, nvml: Callable[..., str], run_driver: RunDriver, server: str
) -> None:
    source = f"""
        import json, mlflow
        from distributor import TorchDistributor
        from distributor.node.agent import system_metrics
        system_metrics.SAMPLE_INTERVAL = 0.2
        mlflow.set_tracking_uri({server!r})
        run_id = mlflow.start_run(experiment_id={experiment!r}).info.run_id
        def wait(run_id):  # without MLflow, whose import takes long
            import time, urllib.request
            address = {server!r} + "/api/2.0/mlflow/runs/get?run_id=" + run_id
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with urllib.request.urlopen(address) as answer:
                    if json.load(answer)["run"]["data"].get("metrics"):
                        break
                time.sleep(0.1)
        TorchDistributor(1, use_gpu=False).run(wait, run_id)
        print("FACTS " + json.dumps(mlflow.get_run(run_id).data.metrics))
    """
    done = run_driver(source, env={"LD_LIBRARY_PATH": nvml(2)})
    metrics = facts_in(done)
    [node] = {name.split("/")[1] for name in metrics}
    assert node == f"node0-{socket.gethostname()}"
    figures = {name.rpartition("/")[2]: figure for name, figure in metrics.items()}
    assert 0 <= figures["cpu_utilization_percentage"] <= 100
    assert figures["system_memory_usage_megabytes"] > 0
    assert figures["gpu_1_utilization_percentage"] == 31
    assert figures["gpu_1_memory_usage_percentage"] == 25


@pytest.mark.slow
def test_no_metric_of_eight_ranks_is_lost(experiment: str) -> None:
    def count() -> None:
        for step in range(1000):
            runtime.progress(step, 1000, loss=step / 7)

    TorchDistributor(8, use_gpu=False, mlflow_ranks="all", timeout=300).run(count)

    [run] = runs_of(experiment)
    for rank in range(8):
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, f"loss/rank_{rank}")
        assert sorted(metric.value for metric in history) == [step / 7 for step in range(1000)]


def test_metrics_wait_for_a_server_that_is_down_for_a_while(
    warned: Callable[[], list[str]],
) -> None:
    down, received = threading.Event(), list[int]()
    down.set()

    def send(metrics: list[int]) -> None:
        if down.is_set():
            raise ConnectionError("connection refused")
        received.extend(metrics)

    queue = MetricsQueue(send)
    queue.put(range(2500))
    assert comes_true(lambda: bool(warned()), 60)
    down.clear()
    assert queue.close() == 0
    assert received == list(range(2500))
    assert len(warned()) == 1


def test_metrics_that_the_server_never_accepts_are_counted(warned: Callable[[], list[str]]) -> None:
    def refuse(metrics: list[int]) -> None:
        raise ConnectionError("connection refused")

    queue = MetricsQueue(refuse)
    queue.put(range(2500))
    assert queue.close() == 2500
    assert warned() == [
        "The MLflow server did not accept metrics: connection refused. Training continues."
    ]
