"""All ranks of a job log to one MLflow run, on a real server."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import torch
from conftest import cluster_is_slow
from support.tracking_server import PRELOAD, metrics_of, mlflow, needs_mlflow, runs_of, train
from support.waiting import comes_true

from distributor import TorchDistributor, distributed
from distributor.control.graceful_shutdown import GracefulShutdown
from distributor.core.redaction import MASK
from distributor.tracking import run as tracking_run

pytestmark = needs_mlflow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]


@cluster_is_slow
def test_ranks_log_to_one_run_made_for_the_job(distribute: Distribute, experiment: str) -> None:
    distribute(2, preload=PRELOAD).run(train, 3)

    [run] = runs_of(experiment)
    assert run.info.run_name == "train"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rank": "0"}
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [metric.value for metric in history] == [1.0, 0.5, 1 / 3]
    assert run.data.tags["distributor.num_processes"] == "2"
    assert run.data.tags["distributor.mode"] in ("local", "cluster")
    assert run.data.tags["distributor.version.torch"].startswith(
        torch.__version__.partition("+")[0]
    )


@cluster_is_slow
def test_a_further_attempt_logs_to_the_same_run(distribute: Distribute, experiment: str) -> None:
    def log() -> None:
        import mlflow

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        mlflow.log_metric("attempt", attempt, step=attempt)
        if not attempt and os.environ["RANK"] == "0":  # the only rank that logs, and it has logged
            os._exit(3)

    distribute(2, max_failures=1, preload=PRELOAD).run(log)

    [run] = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert run.data.tags["distributor.attempt"] == "1"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "attempt")
    assert [metric.value for metric in history] == [0.0, 1.0]


def test_each_failed_attempt_has_a_tag_with_its_cause(experiment: str) -> None:
    def fail_once() -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise KeyError(f"wrong token {os.environ['MY_TOKEN']}")

    env = {"MY_TOKEN": "s3cr3t"}
    TorchDistributor(2, use_gpu=False, max_failures=1, env=env, preload=PRELOAD).run(fail_once)

    [run] = runs_of(experiment)
    assert run.info.status == "FINISHED"
    tag = run.data.tags["distributor.error_of_attempt_0"]
    assert tag.startswith(f"KeyError: 'wrong token {MASK}'\nrank ")
    assert "in fail_once" in tag
    assert "s3cr3t" not in tag
    assert "distributor.error" not in run.data.tags


@cluster_is_slow
def test_the_link_to_the_run_is_printed_once(
    distribute: Distribute, experiment: str, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    distribute(1, preload=PRELOAD).run(train, 1)

    [run] = runs_of(experiment)
    link = f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}"
    printed = capsys.readouterr()
    assert f"MLflow run: {link}" in printed.err
    assert (printed.out + printed.err).count("/#/experiments/") == 1, "MLflow prints no other"


@cluster_is_slow
def test_all_ranks_log_if_requested(distribute: Distribute, experiment: str) -> None:
    def log() -> None:
        import mlflow

        mlflow.log_metric(f"of rank {os.environ['RANK']}", 1.0)

    distribute(3, mlflow_ranks="all", preload=PRELOAD).run(log)

    [run] = runs_of(experiment)
    assert metrics_of(run) == {f"of rank {rank}": 1.0 for rank in range(3)}


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
    distribute: Distribute, experiment: str
) -> None:
    def close_and_look() -> str:
        import mlflow

        for step in range(2):
            with mlflow.start_run() as run:
                mlflow.log_metric("inside", 1.0, step=step)
        return str(mlflow.get_run(run.info.run_id).info.status)

    assert distribute(1, preload=PRELOAD).run(close_and_look) == "RUNNING"
    [run] = runs_of(experiment)
    assert run.info.status == "FINISHED"
    assert metrics_of(run) == {"inside": 1.0}


@cluster_is_slow
def test_code_that_sets_server_and_experiment_itself_logs_to_the_same_run(
    distribute: Distribute, experiment: str, server: str
) -> None:
    """Programs that were written for another launcher do so."""

    def log() -> None:
        import mlflow

        mlflow.set_tracking_uri(server)
        mlflow.set_experiment(experiment_id=experiment)
        mlflow.log_metric("loss", 1.0)

    distribute(2, preload=PRELOAD).run(log)

    [run] = runs_of(experiment)
    assert run.info.run_name == "log"
    assert metrics_of(run) == {"loss": 1.0}


@cluster_is_slow
def test_the_run_of_a_failed_job_is_failed_and_has_the_error(
    distribute: Distribute, experiment: str
) -> None:
    def fail() -> None:
        import mlflow

        if os.environ["RANK"] == "1":
            threading.Event().wait()
        mlflow.log_metric("before", 1.0)
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        distribute(2, preload=PRELOAD).run(fail)

    [run] = runs_of(experiment)
    assert run.info.status == "FAILED"
    assert metrics_of(run) == {"before": 1.0}
    assert run.data.tags["distributor.error"] == "KeyError: 'on purpose'"
    text = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/distributor/error.txt")
    assert "in fail" in text


@cluster_is_slow
def test_the_run_of_a_failed_job_has_the_output_of_its_ranks(
    distribute: Distribute, experiment: str
) -> None:
    def fail() -> None:
        print(f"rank {os.environ['RANK']} says {os.environ['MY_TOKEN']}", flush=True)
        raise ValueError(f"wrong token {os.environ['MY_TOKEN']}")

    with pytest.raises(ValueError, match="s3cr3t"):
        distribute(2, env={"MY_TOKEN": "s3cr3t"}).run(fail)

    [run] = runs_of(experiment)
    recorded = {
        name: mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/distributor/{name}.txt")
        for name in ("rank_0", "error")
    }
    assert f"rank 0 says {MASK}\n" in recorded["rank_0"]
    assert f"ValueError: wrong token {MASK}" in recorded["error"]
    assert run.data.tags["distributor.error"] == f"ValueError: wrong token {MASK}"
    assert "s3cr3t" not in "".join(recorded.values())


def test_a_run_ends_although_its_store_is_slow(
    experiment: str, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    def is_slow(*_: object) -> None:
        threading.Event().wait(30)

    monkeypatch.setattr(tracking_run, "ANSWER_SECONDS", 1.0)
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
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    ranks = TorchDistributor(1, use_gpu=False, storage_path="relative", preload=PRELOAD)
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        ranks.run(train, 1)
    assert runs_of(experiment) == []


def test_the_run_of_a_cancelled_job_is_killed(experiment: str, tmp_path: Path) -> None:
    @distributed(gpus=1, use_gpu=False)
    def wait_forever() -> None:
        (tmp_path / "started").touch()
        threading.Event().wait()

    future = wait_forever.distributed_async()
    assert comes_true((tmp_path / "started").exists, 60)
    assert future.cancel()

    [run] = runs_of(experiment)
    assert run.info.status == "KILLED"


@cluster_is_slow
def test_only_the_first_rank_logs_artifacts_and_models(
    distribute: Distribute, experiment: str
) -> None:
    def log() -> None:
        import mlflow
        import torch

        mlflow.log_text(os.environ["RANK"], "rank.txt")
        how = {"serialization_format": "pickle", "pip_requirements": ["torch"]}
        mlflow.pytorch.log_model(torch.nn.Linear(2, 1), name="model", **how)

    distribute(2, preload=PRELOAD).run(log)

    [run] = runs_of(experiment)
    assert mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/rank.txt") == "0"
    models = mlflow.search_logged_models([experiment], output_format="list")
    assert [model.source_run_id for model in models] == [run.info.run_id]
