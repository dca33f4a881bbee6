"""All ranks of a job log to one MLflow run, on a real server, and so do its metrics."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
from conftest import cluster_is_slow, facts_in
from support.ranks import Distribute
from support.tracking_server import PRELOAD, metrics_of, mlflow, needs_mlflow, runs_of, train
from support.waiting import comes_true

from distributor import TorchDistributor, runtime, tracking
from distributor.control.waiting import GracefulShutdown
from distributor.core.text import MASK
from distributor.tracking import MetricsQueue

pytestmark = needs_mlflow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(
    "distribute",
    ["local", pytest.param("cluster", marks=[pytest.mark.slow, pytest.mark.spark])],
    indirect=True,
)
def test_ranks_log_to_one_run_made_for_the_job(
    distribute: Distribute, experiment: str, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    distribute(2, preload=PRELOAD).run(train, 3)

    [run] = runs_of(experiment)
    assert run.info.run_name == "train"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rank": "0"}
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [metric.value for metric in history] == [1.0, 0.5, 1 / 3]
    assert run.data.tags["distributor.num_processes"] == "2"
    assert run.data.tags["distributor.mode"] in ("local", "cluster")
    printed = capsys.readouterr()
    link = f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}"
    assert f"MLflow run: {link}" in printed.err
    assert (printed.out + printed.err).count("/#/experiments/") == 1, "MLflow prints no other"


@cluster_is_slow
def test_a_further_attempt_logs_to_the_same_run(distribute: Distribute, experiment: str) -> None:
    def log() -> None:
        import mlflow

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        mlflow.log_metric("attempt", attempt, step=attempt)
        if not attempt:
            raise KeyError(f"wrong token {os.environ['MY_TOKEN']}")

    env = {"MY_TOKEN": "s3cr3t"}
    distribute(1, max_failures=1, env=env, preload=PRELOAD).run(log)

    [run] = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert run.data.tags["distributor.attempt"] == "1"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "attempt")
    assert [metric.value for metric in history] == [0.0, 1.0]
    cause = run.data.tags["distributor.error_of_attempt_0"]
    assert cause.startswith(f"KeyError: 'wrong token {MASK}'\nrank ")
    assert "in log" in cause
    assert "s3cr3t" not in cause
    assert "distributor.error" not in run.data.tags


@cluster_is_slow
def test_ranks_log_to_the_run_that_is_active_on_the_driver_which_stays_open(
    distribute: Distribute, experiment: str
) -> None:
    with mlflow.start_run(run_name="mine") as mine:
        distribute(2, preload=PRELOAD).run(train, 2)
        assert mlflow.get_run(mine.info.run_id).info.status == "RUNNING"
        mlflow.log_metric("afterwards", 1.0)

    [run] = runs_of(experiment)
    assert run.info.run_id == mine.info.run_id
    assert run.info.status == "FINISHED"
    assert metrics_of(run) == {"loss": 0.5, "afterwards": 1.0}


@cluster_is_slow
def test_a_rank_that_closes_the_run_does_not_end_it(
    distribute: Distribute, experiment: str, server: str
) -> None:
    def close_and_look() -> str:
        import mlflow

        mlflow.set_tracking_uri(server)  # as programs that were written for another launcher
        mlflow.set_experiment(experiment_id=experiment)
        for step in range(2):
            with mlflow.start_run() as run:
                mlflow.log_metric("inside", 1.0, step=step)
        return str(mlflow.get_run(run.info.run_id).info.status)

    assert distribute(1, preload=PRELOAD).run(close_and_look) == "RUNNING"
    [run] = runs_of(experiment)
    assert run.info.run_name == "close_and_look"
    assert run.info.status == "FINISHED"
    assert metrics_of(run) == {"inside": 1.0}


@cluster_is_slow
def test_the_run_of_a_failed_job_has_the_error_and_the_output(
    distribute: Distribute, experiment: str
) -> None:
    def fail() -> None:
        import mlflow

        if os.environ["RANK"] == "1":
            threading.Event().wait()
        mlflow.log_metric("before", 1.0)
        print(f"rank {os.environ['RANK']} says {os.environ['MY_TOKEN']}", flush=True)
        raise ValueError(f"wrong token {os.environ['MY_TOKEN']}")

    with pytest.raises(ValueError, match="s3cr3t"):
        distribute(2, env={"MY_TOKEN": "s3cr3t"}, preload=PRELOAD).run(fail)

    [run] = runs_of(experiment)
    assert run.info.status == "FAILED"
    assert metrics_of(run) == {"before": 1.0}
    output, error, page = (
        mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/distributor/{name}")
        for name in ("rank_0.txt", "error.txt", "report.html")
    )
    assert f"rank 0 says {MASK}\n" in output
    assert "in fail" in error
    assert f"ValueError: wrong token {MASK}" in error
    assert run.data.tags["distributor.error"] == f"ValueError: wrong token {MASK}"
    assert f"ValueError: wrong token {MASK}" in page
    assert "s3cr3t" not in output + error + page


def test_a_run_ends_although_its_store_is_slow(
    experiment: str, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    def is_slow(*_: object) -> None:
        threading.Event().wait(30)

    monkeypatch.setattr(tracking, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(mlflow.MlflowClient, "log_artifacts", is_slow)
    with pytest.raises(KeyError):
        TorchDistributor(1, use_gpu=False, preload=PRELOAD).run({}.__getitem__, "missing")
    [run] = runs_of(experiment)
    assert run.info.status == "FAILED"
    assert run.data.tags["distributor.error"] == "KeyError: 'missing'"
    assert "could not record the error: no answer within 1 s" in "\n".join(warned())


def test_a_run_that_is_interrupted_before_it_begins_is_killed(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GracefulShutdown, "__enter__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        TorchDistributor(1, use_gpu=False, preload=PRELOAD).run(train, 1)
    [run] = runs_of(experiment)
    assert run.info.status == "KILLED"


def test_settings_that_fail_create_no_run(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = TorchDistributor(1, use_gpu=False, storage_path="relative", preload=PRELOAD)
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError):
        ranks.run(train, 1)
    assert runs_of(experiment) == []


@cluster_is_slow
def test_only_the_first_rank_logs_artifacts_and_models(
    distribute: Distribute, experiment: str
) -> None:
    def log() -> None:
        import mlflow
        import torch

        mlflow.log_text("text", f"{os.environ['RANK']}.txt")
        how = {"serialization_format": "pickle", "pip_requirements": ["torch"]}
        mlflow.pytorch.log_model(torch.nn.Linear(2, 1), name="model", **how)

    distribute(2, preload=PRELOAD).run(log)

    [run] = runs_of(experiment)
    files = [file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)]
    assert [path for path in files if path.endswith(".txt")] == ["0.txt"]
    models = mlflow.search_logged_models([experiment], output_format="list")
    assert [model.source_run_id for model in models] == [run.info.run_id]


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


@pytest.mark.slow
def test_system_metrics_of_a_node_are_recorded_under_its_name(
    experiment: str, nvml: Callable[..., str], run_driver: RunDriver, server: str
) -> None:
    source = f"""
        import json, mlflow
        from distributor import TorchDistributor
        from distributor.node.agent import usage
        usage.SAMPLE_INTERVAL = 0.2
        mlflow.set_tracking_uri({server!r})
        run_id = mlflow.start_run(experiment_id={experiment!r}).info.run_id
        def wait():
            import time
            time.sleep(5)
        TorchDistributor(1, use_gpu=False).run(wait)
        print("FACTS " + json.dumps(mlflow.get_run(run_id).data.metrics))
    """
    metrics = facts_in(run_driver(source, env={"LD_LIBRARY_PATH": nvml(2)}))
    node = f"system/node0-{socket.gethostname()}"
    assert 0 <= metrics[f"{node}/cpu_utilization_percentage"] <= 100
    assert metrics[f"{node}/system_memory_usage_megabytes"] > 0
    assert metrics[f"{node}/gpu_1_utilization_percentage"] == 31
    assert metrics[f"{node}/gpu_1_memory_usage_percentage"] == 25


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
    [warning] = warned()
    assert "did not accept metrics: connection refused. Training continues" in warning
    down.set()
    queue = MetricsQueue(send)
    queue.put(range(2500))
    assert queue.close() == 2500, "the number of those that are lost"
