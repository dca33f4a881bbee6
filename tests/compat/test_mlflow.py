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
from support.tracking_server import mlflow, needs_mlflow

from distributor._compat import mlflow as compat

pytestmark = [
    pytest.mark.repository,
    needs_mlflow,
    pytest.mark.xdist_group("mlflow"),  # whose process has imported it
]


def lost(name: str, dependent: str) -> str:
    return f"MLflow {mlflow.__version__} no longer has {name}; {dependent} depends on it"


def test_importing_the_package_does_not_import_mlflow() -> None:
    program = "import sys, distributor, distributor._compat.mlflow; print('mlflow' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


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
    fluent = mlflow.tracking.fluent
    assert hasattr(fluent, "_get_experiment_id"), lost(
        "mlflow.tracking.fluent._get_experiment_id", "the experiment of a run made for a job"
    )
    assert hasattr(fluent, "_active_experiment_id"), lost(
        "mlflow.tracking.fluent._active_experiment_id", "attaching ranks to a run of another one"
    )
    mlflow.set_tracking_uri(database)
    try:
        chosen = mlflow.set_experiment("chosen").experiment_id
        os.environ.pop("MLFLOW_EXPERIMENT_ID", None)  # newer versions of MLflow set it
        assert compat.default_experiment_id() == chosen
        compat.forget_active_experiment()
        assert compat.default_experiment_id() == "0", lost(
            "the meaning of _active_experiment_id", "attaching ranks to a run of another experiment"
        )
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

def start_run(calls):
    print("RUN", mlflow.start_run().info.run_id, flush=True)
    exec(calls)

mlflow.set_tracking_uri(sys.argv[1])
for calls in {list(ENDINGS)!r}:
    if not os.fork():
        start_run(calls)
        sys.exit()
    _, status = os.wait()
    assert status == 0
"""


@pytest.fixture(scope="module")
def statuses(database: str) -> dict[str, str]:
    """Return the status of each run of `ENDINGS`; their processes have imported MLflow by fork."""
    client = mlflow.MlflowClient(database)
    program = [sys.executable, "-c", START_RUNS, database]
    output = subprocess.check_output(program, text=True)
    ids = [line.split()[1] for line in output.splitlines() if line.startswith("RUN ")]
    found = [client.get_run(run_id).info.status for run_id in ids]
    return dict(zip(ENDINGS, found, strict=True))


@pytest.mark.parametrize("calls", ENDINGS)
def test_mlflow_ends_a_run_by_an_exit_handler_that_can_be_removed(
    statuses: dict[str, str], calls: str
) -> None:
    assert hasattr(mlflow.tracking.fluent, "_safe_end_run"), lost(
        "mlflow.tracking.fluent._safe_end_run", "leaving the end of the job's run to the driver"
    )
    assert statuses[calls] == ENDINGS[calls], lost(
        "the exit handler _safe_end_run", "leaving the end of the job's run to the driver"
    )


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
        try:
            found = compat.databricks_credentials("databricks")
        except (ImportError, AttributeError) as error:
            name = "mlflow.utils.databricks_utils.get_databricks_host_creds"
            pytest.fail(f"{lost(name, 'tracking on Databricks')}: {error}")
        finally:
            workspace.shutdown()
    assert found == (host, "t0ken")


def test_operations_that_log_nothing_are_finished() -> None:
    try:
        operations: Any = compat.finished_operations()
    except (ImportError, AttributeError, TypeError) as error:
        name = "mlflow.utils.async_logging.run_operations.RunOperations"
        pytest.fail(f"{lost(name, 'asynchronous logging in ranks that do not log')}: {error}")
    operations.wait()


@pytest.mark.parametrize(
    ("module", "owner", "name", "parameters"),
    [
        ("mlflow.tracking.registry", "StoreRegistry", "get_store_builder", ["store_uri"]),
        (
            "mlflow.store.artifact.artifact_repository_registry",
            "ArtifactRepositoryRegistry",
            "get_artifact_repository",
            ["artifact_uri"],
        ),
    ],
)
def test_stores_are_made_by_the_registries_that_ranks_change(
    module: str, owner: str, name: str, parameters: list[str]
) -> None:
    """These names are public, but MLflow documents them only for authors of plugins."""
    importlib.import_module("mlflow")
    found = getattr(getattr(sys.modules.get(module), owner, None), name, None)
    assert found is not None, lost(f"{module}.{owner}.{name}", "the choice of stores in ranks")
    assert list(inspect.signature(found).parameters)[1 : 1 + len(parameters)] == parameters
