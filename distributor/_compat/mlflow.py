"""The private API of MLflow that tracking depends on; MLflow is imported when it is used."""

from __future__ import annotations

import atexit
import threading
from importlib import import_module
from typing import Any

_experiment_lock = threading.Lock()


def default_experiment_id() -> str | None:
    """Return the experiment that a new run belongs to; there is no public name for all sources."""
    with _experiment_lock:  # of two runs that begin at once, MLflow lets only one create it
        return _fluent()._get_experiment_id()  # type: ignore[no-any-return]


def forget_active_experiment() -> None:
    """Undo `mlflow.set_experiment`, which makes MLflow refuse runs of other experiments."""
    _fluent()._active_experiment_id = None


def keep_run_open_at_exit() -> None:
    """Prevent MLflow from ending the active run when this process exits."""
    atexit.unregister(_fluent()._safe_end_run)


def end_run_at_exit() -> None:
    """Have MLflow end the active run when this process exits, as it does by default."""
    atexit.register(_fluent()._safe_end_run)


def databricks_credentials(tracking_uri: str) -> tuple[str | None, str | None]:
    """Return the host and token of a ``databricks`` address, perhaps of a profile in a file."""
    utils: Any = import_module("mlflow.utils.databricks_utils")
    found = utils.get_databricks_host_creds(tracking_uri)
    return found.host, found.token


def finished_operations() -> object:
    """Return what an asynchronous call of MLflow returns, with nothing left to wait for."""
    operations: Any = import_module("mlflow.utils.async_logging.run_operations")
    return operations.RunOperations([])


def client_that_prints_no_link(uri: str) -> Any:
    """Return a client that does not print the link to a run of a server when it ends the run."""
    client = import_module("mlflow").MlflowClient(uri)
    client._tracking_client._log_url = lambda run_id: None
    return client


def _fluent() -> Any:
    return import_module("mlflow.tracking.fluent")
