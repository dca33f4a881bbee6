"""Stores that stand between MLflow and its own stores in a rank.

They delegate to a store of MLflow by name instead of subclassing its abstract store, which has more
than a hundred methods and other ones in each version.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import uuid
from collections.abc import Callable
from importlib import import_module
from typing import Any

from distributor._compat.mlflow import finished_operations
from distributor.core.mlflow_env import OFF_REASON, SERVER_ERRORS, USE_NOT_DETECTED
from distributor.core.text import counted
from distributor.node.worker.mlflow_entities import (
    make_experiment,
    make_logged_model,
    make_model_version,
    make_registered_model,
    make_run,
)

GETTERS = frozenset(
    {"get_experiment", "get_experiment_by_name", "get_logged_model", "get_model_version"}
)
"""Methods that return something that may have been created in this process alone."""
READ_VERBS = frozenset(
    {"batch", "calculate", "download", "filter", "find", "for", "get", "list", "load", "max"}
    | {"query", "resolve", "search", "supports", "verify"}
)
"""What the names of methods begin with that change nothing in a store."""


class LossReporter:
    """Prints why a rank does not log, or that a server failed and how many calls were lost."""

    def __init__(self) -> None:
        self._lost = 0
        is_rank_0 = os.environ["RANK"] == "0"
        self._off_reason = os.environ.get(OFF_REASON, USE_NOT_DETECTED) if is_rank_0 else ""

    def report_off(self) -> None:
        """Print why nothing is logged: once, on rank 0, and unless the driver has warned."""
        if self._off_reason:
            print(f"distributor: {self._off_reason}", file=sys.stderr)
            self._off_reason = ""

    def count(self, error: Exception) -> None:
        """Count a call that the server failed, and print the first error."""
        if not self._lost:
            print(
                f"distributor: The MLflow server did not accept what was logged: {error}. "
                "Training continues.",
                file=sys.stderr,
            )
            atexit.register(self._report_total)
        self._lost += 1

    def _report_total(self) -> None:
        lost = counted(self._lost, "call")
        print(f"distributor: {lost} did not reach MLflow.", file=sys.stderr)


class StoreProxy:
    """A store of MLflow whose methods that change something go through `_write`.

    Parameters
    ----------
    store : object
        MLflow's store, for tracking, registered models or artifacts.
    run_id : str, optional
        The job's run.
    """

    def __init__(self, store: Any, run_id: str | None = None) -> None:
        self._store = store
        self._run_id = run_id

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # MLflow checks by `isinstance` which protocol a store speaks
        return type(self._store)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name.startswith("_") or name.partition("_")[0] in READ_VERBS or not callable(found):
            return found
        return functools.partial(self._write, name, found)

    def get_run(self, run_id: str) -> Any:
        """Return a run; the job's own even if the server fails."""
        try:
            return self._store.get_run(run_id)
        except Exception as error:
            if run_id != self._run_id or not _is_server_error(error):
                raise
            return make_run(run_id)

    def _write(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class FaultTolerantStore(StoreProxy):
    """Drops what a failing server does not accept, and does not end the job's run.

    Parameters
    ----------
    store, run_id
        As for `StoreProxy`.
    losses : LossReporter
        Counts the calls that were dropped.
    """

    def __init__(self, store: Any, run_id: str | None, losses: LossReporter) -> None:
        super().__init__(store, run_id)
        self._losses = losses

    def _write(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("create_"):
            return method(*args, **kwargs)  # the caller needs what it returns
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if not _is_server_error(error):
                raise
            self._losses.count(error)

    def update_run_info(
        self, run_id: str, run_status: Any, end_time: Any, run_name: Any = None
    ) -> Any:
        """Change the status and name of a run, but of the job's run only the name."""
        if run_id == self._run_id:
            if run_name is None:
                return None
            run_status, end_time = import_module("mlflow.entities").RunStatus.RUNNING, None
        update = self._store.update_run_info
        return self._write("update_run_info", update, run_id, run_status, end_time, run_name)


class ReadOnlyStore(StoreProxy):
    """Drops what is written. What is created exists in this process alone."""

    def __init__(self, store: Any, run_id: str | None = None) -> None:
        super().__init__(store, run_id)
        self._created: dict[str, Any] = {}

    def get_run(self, run_id: str) -> Any:
        return self._created.get(run_id) or super().get_run(run_id)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return functools.partial(self._read, found) if name in GETTERS else found

    def _read(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        key = next(iter((*args, *kwargs.values())), None)
        created = self._created.get(str(key))
        return method(*args, **kwargs) if created is None else created

    def _write(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return finished_operations() if name.endswith("_async") else None

    def create_run(self, experiment_id: str, *args: Any, **kwargs: Any) -> Any:
        run_id = uuid.uuid4().hex
        return self._keep(make_run(run_id, experiment_id), run_id)

    def create_experiment(self, name: str, *args: Any, **kwargs: Any) -> str:
        experiment_id = str(uuid.uuid4().int % 10**18)
        self._keep(make_experiment(experiment_id, name), experiment_id, name)
        return experiment_id

    def create_logged_model(self, *args: Any, **kwargs: Any) -> Any:
        model_id = f"m-{uuid.uuid4().hex}"
        return self._keep(make_logged_model(model_id, *args, **kwargs), model_id)

    def finalize_logged_model(self, model_id: str, *args: Any, **kwargs: Any) -> Any:
        return self._created.get(model_id)

    def start_trace(self, trace_info: Any) -> Any:
        return trace_info

    def create_registered_model(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return make_registered_model(name)

    def create_model_version(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._keep(make_model_version(name), name)

    def _keep(self, created: Any, *keys: str) -> Any:
        self._created.update(dict.fromkeys(keys, created))
        return created


class EmptyStore:
    """A store without network or files: it has every run and experiment that it is asked for."""

    supports_workspaces = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        verb = name.partition("_")[0]
        if verb == "search":
            return lambda *args, **kwargs: _empty_page()
        if verb == "list":
            return lambda *args, **kwargs: []
        return _raise_not_found

    def get_run(self, run_id: str) -> Any:
        return make_run(run_id)

    def get_experiment(self, experiment_id: str, *args: Any) -> Any:
        return make_experiment(experiment_id, experiment_id)

    def get_experiment_by_name(self, name: str, *args: Any) -> Any:
        return make_experiment("0", name)


def _empty_page() -> Any:
    return import_module("mlflow.store.entities").PagedList([], None)


def _raise_not_found(*args: Any, **kwargs: Any) -> Any:
    exceptions: Any = import_module("mlflow.exceptions")
    codes: Any = import_module("mlflow.protos.databricks_pb2")
    raise exceptions.MlflowException(
        "MLflow is off in this rank, because the run is not tracked: there is nothing to read.",
        error_code=codes.RESOURCE_DOES_NOT_EXIST,
    )


def _is_server_error(error: Exception) -> bool:
    return getattr(error, "error_code", None) in SERVER_ERRORS
