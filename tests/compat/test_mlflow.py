"""Canaries for what `distributor._compat.mlflow` uses of MLflow that no other test would notice."""

from __future__ import annotations

import http.server
import os
import threading

import pytest
from support.canary import relies_on
from support.tracking_server import mlflow, needs_mlflow

from distributor._compat import mlflow as compat

pytestmark = [
    pytest.mark.repository,
    needs_mlflow,
    pytest.mark.xdist_group("mlflow"),  # whose process has imported it
]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create a database, which takes MLflow seconds, and return its address."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    mlflow.MlflowClient(uri).search_experiments()  # creates the tables
    return uri


def test_the_default_experiment_is_the_one_that_was_set(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    what = "tracking.fluent._get_experiment_id or ._active_experiment_id"
    mlflow.set_tracking_uri(database)
    try:
        chosen = mlflow.set_experiment("chosen").experiment_id
        os.environ.pop("MLFLOW_EXPERIMENT_ID", None)  # newer versions of MLflow set it
        with relies_on("mlflow", what, "mlflow.default_experiment_id"):
            assert compat.default_experiment_id() == chosen
            compat.forget_active_experiment()
            assert compat.default_experiment_id() == "0"
    finally:
        mlflow.set_tracking_uri(None)


class Workspace(http.server.BaseHTTPRequestHandler):
    """A host that does not describe itself: a Databricks client asks for that first."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_databricks_credentials_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Workspace) as workspace:
        threading.Thread(target=workspace.serve_forever, daemon=True).start()
        host = f"http://127.0.0.1:{workspace.server_port}"
        monkeypatch.setenv("DATABRICKS_HOST", host)
        monkeypatch.setenv("DATABRICKS_TOKEN", "t0ken")
        what = "utils.databricks_utils.get_databricks_host_creds"
        with relies_on("mlflow", what, "mlflow.databricks_credentials"):
            assert compat.databricks_credentials("databricks") == (host, "t0ken")
        workspace.shutdown()
