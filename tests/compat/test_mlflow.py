"""The private names of MLflow that this package uses exist, and do what it needs of them."""

from __future__ import annotations

import http.server
import importlib
import inspect
import os
import subprocess
import sys
import threading
from typing import Any

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


ENDINGS = {
    "": "FINISHED",
    "compat.keep_run_open_at_exit()": "RUNNING",
    "compat.keep_run_open_at_exit(); compat.end_run_at_exit()": "FINISHED",
}
"""The status of a run after its process has made these calls and exited."""
START_RUNS = f"""
import os, sys
import mlflow
import mlflow.store.tracking.sqlalchemy_store  # once, before the forks
from distributor._compat import mlflow as compat

mlflow.set_tracking_uri(sys.argv[1])
for calls in {list(ENDINGS)!r}:
    if not os.fork():
        print(mlflow.start_run().info.run_id, flush=True)
        exec(calls)
        sys.exit()
    _, status = os.wait()
    assert status == 0
"""


def test_mlflow_ends_a_run_by_an_exit_handler_that_can_be_removed(database: str) -> None:
    client = mlflow.MlflowClient(database)
    with relies_on("mlflow", "tracking.fluent._safe_end_run", "mlflow.keep_run_open_at_exit"):
        program = [sys.executable, "-c", START_RUNS, database]
        ids = subprocess.check_output(program, text=True).split()
        assert [client.get_run(each).info.status for each in ids] == list(ENDINGS.values())


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


def test_operations_that_log_nothing_are_finished() -> None:
    what = "utils.async_logging.run_operations.RunOperations"
    with relies_on("mlflow", what, "mlflow.finished_operations"):
        operations: Any = compat.finished_operations()
        operations.wait()


REGISTRIES = {
    "mlflow.tracking.registry": ("StoreRegistry", "get_store_builder", "store_uri"),
    "mlflow.store.artifact.artifact_repository_registry": (
        "ArtifactRepositoryRegistry",
        "get_artifact_repository",
        "artifact_uri",
    ),
}


@pytest.mark.parametrize("module", REGISTRIES)
def test_stores_are_made_by_the_registries_that_ranks_change(module: str) -> None:
    """These names are public, but MLflow documents them only for authors of plugins."""
    owner, name, parameter = REGISTRIES[module]
    importlib.import_module("mlflow")
    with relies_on("mlflow", f"{module}.{owner}.{name}", "mlflow"):
        found = getattr(getattr(sys.modules[module], owner), name)
        assert list(inspect.signature(found).parameters)[1] == parameter
