"""A real MLflow server, and fixtures that set it as a user does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from distributor._compat.mlflow import forget_active_experiment
from support.ports import free_port
from support.waiting import comes_true

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PRELOAD = ("mlflow", "mlflow.pytorch", "mlflow.store.tracking.rest_store")
"""Modules that local ranks inherit by fork; their import costs each rank seconds of CPU time."""
START_SECONDS = 120.0
SERVER_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # it would start further processes
}


class _OnFirstUse:
    """MLflow, imported when it is used: each process of the tests collects all, and runs some."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__version__":
            raise AttributeError(name)  # pytest looks for its own names in each global
        return getattr(import_module("mlflow"), name)


mlflow: Any = _OnFirstUse()
needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed")


@contextlib.contextmanager
def tracking_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """Start a server and yield its address. A server cannot choose a free port itself."""
    uri = f"http://127.0.0.1:{port or free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    command += ["--host", "127.0.0.1", "--port", uri.rpartition(":")[2]]

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
            return True
        return False

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **SERVER_VARIABLES},
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    try:
        assert comes_true(answers, START_SECONDS), (folder / "log").read_text()
        yield uri
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the session's one server, and yield its address."""
    pytest.importorskip("mlflow")
    with tracking_server(tmp_path_factory.mktemp("server")) as uri:
        yield uri


@pytest.fixture
def experiment(server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the server and an experiment for the test, as a user does, and yield its id."""
    mlflow.set_tracking_uri(server)
    yield mlflow.set_experiment(request.node.name).experiment_id
    mlflow.set_tracking_uri(None)
    forget_active_experiment()
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)  # newer versions of MLflow set it


def runs_of(experiment: str) -> list[Any]:
    """Return the runs of an experiment."""
    return list(mlflow.MlflowClient().search_runs([experiment]))


def metrics_of(run: Any) -> dict[str, float]:
    """Return what was logged, without the system metrics that every longer run has."""
    metrics = run.data.metrics.items()
    return {name: value for name, value in metrics if not name.startswith("system/")}


def train(steps: int) -> str:
    """Log a metric for each step, and the rank; ranks receive this function by value."""
    import mlflow

    for step in range(steps):
        mlflow.log_metric("loss", 1.0 / (step + 1), step=step)
    mlflow.log_params({"rank": os.environ["RANK"]})
    return "trained"
