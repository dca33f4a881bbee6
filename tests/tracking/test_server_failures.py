"""A tracking server that fails or refuses costs a warning or an early error, and no training."""

from __future__ import annotations

import base64
import http.server
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ports import free_port
from support.tracking_server import PRELOAD, needs_mlflow, train

from distributor import DistributorError, TorchDistributor
from distributor.tracking import run as tracking_run

pytestmark = needs_mlflow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]


@cluster_is_slow
def test_training_continues_if_the_server_goes_away(
    distribute: Distribute, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tracking_run.TrackedRun("0" * 32, "1", f"http://127.0.0.1:{free_port()}", False)
    monkeypatch.setattr("distributor.prepared_run.open_run", lambda *_: gone)
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}

    assert distribute(2, env=limits, preload=PRELOAD).run(train, 2) == "trained"
    err = capsys.readouterr().err
    assert err.count("The MLflow server did not accept what was logged") == 1
    assert "3 calls did not reach MLflow" in err


@pytest.fixture(params=["refused", "unanswered"])
def gone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the address of a server that refuses connections, or accepts them and never answers."""
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if request.param == "refused":
            listener.close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setattr(tracking_run, "ANSWER_SECONDS", 1.0)
        yield uri


def test_a_server_that_cannot_be_reached_costs_one_warning(
    gone: str, warned: Callable[[], list[str]]
) -> None:
    assert TorchDistributor(1, use_gpu=False).run(lambda: "trained") == "trained"
    [warning] = warned()
    assert f"The MLflow server at {gone} cannot be reached, so this run is not tracked" in warning


def use_mlflow_in_many_ways(uri: str, folder: str) -> list[str]:
    """Do what training functions do with MLflow, and return the names of the files it created."""
    from pathlib import Path

    import mlflow
    import torch

    Path(folder, os.environ["RANK"]).mkdir()
    os.chdir(Path(folder, os.environ["RANK"]))
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("mine")
    mlflow.pytorch.autolog()
    with mlflow.start_run(run_name="named") as run:
        log_all_kinds(run.info.run_id)
        model = mlflow.pytorch.log_model(
            torch.nn.Linear(2, 1), name="model", registered_model_name="registered"
        )
        mlflow.register_model(model.model_uri, "again")
        with mlflow.start_run(nested=True):
            mlflow.log_metric("inner", 1.0)
        assert mlflow.active_run().info.run_id == run.info.run_id
    mlflow.start_run()
    mlflow.end_run()
    mlflow.log_metric("bare", 1.0)
    use_the_client(mlflow.MlflowClient())
    mlflow.MlflowClient("sqlite:///another.db").create_run("0")
    return sorted(os.listdir())


def log_all_kinds(run_id: str) -> None:
    import mlflow

    mlflow.log_metric("loss", 1.0, step=1)
    mlflow.log_metric("late", 1.0, synchronous=False).wait()
    mlflow.log_metrics({"a": 1.0})
    mlflow.log_param("p", 1)
    mlflow.log_params({"q": 2})
    mlflow.set_tags({"t": "v"})
    mlflow.log_text("text", "a.txt")
    mlflow.log_dict({"a": 1}, "a.json")
    mlflow.log_table({"a": [1]}, "table.json")
    mlflow.log_artifact(__import__("torch").__file__)
    assert mlflow.get_run(run_id).info.run_id == run_id


def use_the_client(client: Any) -> None:
    run_id = client.create_run(client.create_experiment("new")).info.run_id
    client.log_metric(run_id, "a", 1.0)
    client.log_batch(run_id)
    client.set_tag(run_id, "t", "v")
    client.set_terminated(run_id)
    assert list(client.search_runs(["0"])) == []


@cluster_is_slow
def test_mlflow_is_off_if_the_server_cannot_be_reached_at_the_start(
    distribute: Distribute, gone: str, warned: Callable[[], list[str]], tmp_path: Path
) -> None:
    """Without that, MLflow would retry for minutes in each rank, and then raise."""
    ranks = distribute(2, timeout=90, preload=PRELOAD)
    assert ranks.run_all(use_mlflow_in_many_ways, gone, str(tmp_path)) == [[], []]
    [warning] = warned()
    assert f"The MLflow server at {gone} cannot be reached, so this run is not tracked" in warning


@pytest.mark.slow
def test_lightning_trains_if_mlflow_is_off(gone: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    def fit() -> None:
        import lightning
        import mlflow
        from lightning.pytorch.demos.boring_classes import BoringModel
        from lightning.pytorch.loggers import MLFlowLogger

        mlflow.pytorch.autolog()
        logger = MLFlowLogger("mine", tracking_uri=gone, log_model=True)
        logger.log_hyperparams({"lr": 0.1})
        options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "log_every_n_steps": 1}
        lightning.Trainer(
            default_root_dir=tmp_path, max_epochs=1, limit_train_batches=2, logger=logger, **options
        ).fit(BoringModel())

    TorchDistributor(2, use_gpu=False, timeout=120).run(fit)


class Refusing(http.server.BaseHTTPRequestHandler):
    """A server that accepts one user, for whom it has no runs."""

    def do_GET(self) -> None:
        expected = "Basic " + base64.b64encode(b"ada:secret").decode()
        self.send_error(404 if self.headers.get("Authorization") == expected else 401)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_refused_credentials_are_an_error_before_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{refusing.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(DistributorError, match=r"refuses the credentials.*_PASSWORD"):
            TorchDistributor(1, use_gpu=False).run(print)
        refusing.shutdown()
