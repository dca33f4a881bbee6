"""Makes MLflow in a rank log to the job's run, or nowhere; only the driver ends that run.

MLflow reaches everything outside its process through stores: for tracking, for registered models
and for artifacts. Its registries build a store by the scheme of an address. Once a rank imports
MLflow, the public methods of these registries return a store of this module, whatever address the
user's code names:

- in a rank that logs, MLflow's own store; if the server fails, training continues;
- in a rank that does not log, MLflow's own store for reading, while writes are dropped;
- if nothing is tracked, an empty store: no network, no files, no retries.

A store for a URI scheme of this package, registered as a plugin, would not be enough: the user's
code may name any address, and a plugin that takes over a built-in scheme cannot build its store.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import uuid
from collections.abc import Callable
from importlib import import_module
from typing import Any

from distributor._compat import mlflow as compat
from distributor._compat import replacing
from distributor.core import rank_variables as variables
from distributor.core.text import counted
from distributor.rank.import_hooks import adapt

# The registries of stores that are replaced, by the groups in which plugins extend them.
STORE_GROUPS = ("mlflow.tracking_store", "mlflow.model_registry_store")
NOWHERE = "distributor-nowhere"  # the scheme of the addresses of artifacts that are not stored
# Methods that return something that may have been created in this process alone.
GETTERS = frozenset(
    {"get_experiment", "get_experiment_by_name", "get_logged_model", "get_model_version"}
)
# What the names of methods begin with that change nothing in a store.
READ_VERBS = frozenset(
    {"batch", "calculate", "download", "filter", "find", "for", "get", "list", "load", "max"}
    | {"query", "resolve", "search", "supports", "verify"}
)


def install_mlflow_hooks() -> None:
    """Have MLflow log to the job's run, or nowhere, once this rank imports it."""
    hooks = _Hooks()
    changes = {
        "mlflow": hooks.change_registration,
        "mlflow.models.model": hooks.change_model_logging,
        "mlflow.store.artifact.artifact_repository_registry": hooks.change_artifact_stores,
        "mlflow.tracking.fluent": hooks.change_runs,
        "mlflow.tracking.registry": hooks.change_stores,
    }
    for name, change in changes.items():
        adapt(name, change)


class _Hooks:
    """The changes to MLflow's modules, and which stores this rank logs to.

    That is read from the environment that the driver has prepared.
    """

    def __init__(self) -> None:
        env = os.environ
        self._logging_ranks = env.get(variables.LOGGING_RANKS, variables.NAMED_SERVER)
        self._is_rank_0 = env["RANK"] == "0"
        self._has_run = self._logging_ranks in (variables.FIRST, variables.ALL)
        self._run_id = env.get(variables.RUN_ID)
        self._job_uri = env.get("MLFLOW_TRACKING_URI", "")
        # Why nothing is logged; rank 0 prints it once, unless the driver has warned.
        off_reason = env.get(variables.OFF_REASON, variables.USE_NOT_DETECTED)
        self._off_reason = off_reason if self._is_rank_0 else ""
        self._losses = _LossReporter()

    def _logs_to(self, uri: str) -> bool:
        if self._logging_ranks == variables.NAMED_SERVER and not _is_server(uri):
            return False
        if self._logging_ranks == variables.ALL and not self._is_other_server(uri):
            return True
        return self._logging_ranks != variables.NO_RANK and self._is_rank_0

    def _logs(self) -> bool:
        """Return whether this rank logs to the store that is set now."""
        return self._logs_to(_tracking_uri())

    def _is_other_server(self, uri: str) -> bool:
        """Return whether the job's run is in a file, and this is a server that the code names."""
        return self._job_uri.startswith(variables.LOCAL_STORES) and _is_server(uri)

    def _proxy(self, store: Any, *, logs: bool) -> _StoreProxy:
        if logs:
            return _FaultTolerantStore(store, self._run_id, self._losses)
        return _ReadOnlyStore(store, self._run_id)

    def change_stores(self, module: Any) -> None:
        """Replace the stores for tracking and registered models."""

        @replacing(module.StoreRegistry, "get_store_builder")
        def get_store_builder(original: Any, registry: Any, store_uri: str) -> Any:
            build = original(registry, store_uri)
            if registry.group_name not in STORE_GROUPS:
                return build

            @functools.wraps(build, updated=())  # the registry looks at the parameters
            def build_proxy(*args: Any, **kwargs: Any) -> _StoreProxy:
                logs = self._logs_to(store_uri)
                if not logs and not self._has_run:
                    if self._off_reason:
                        print(f"distributor: {self._off_reason}", file=sys.stderr)
                        self._off_reason = ""
                    return _ReadOnlyStore(_EmptyStore())
                # Not at the import of MLflow, which may have been in the zygote, for another run.
                for name, value in variables.HTTP_DEFAULTS.items():
                    os.environ.setdefault(name, value)
                return self._proxy(build(*args, **kwargs), logs=logs)

            return build_proxy

    def change_artifact_stores(self, module: Any) -> None:
        """Replace the stores for artifacts: read anywhere, written below runs."""

        @replacing(module.ArtifactRepositoryRegistry, "get_artifact_repository")
        def get_artifact_repository(
            original: Any, registry: Any, artifact_uri: str, *args: Any, **kwargs: Any
        ) -> Any:
            if str(artifact_uri).startswith(f"{NOWHERE}:"):
                return _ReadOnlyStore(_EmptyStore())
            store = original(registry, artifact_uri, *args, **kwargs)
            return self._proxy(store, logs=self._logs())

    def change_runs(self, fluent: Any) -> None:
        """Have every start of a run attach to the job's run: MLflow forgets it after the first.

        If the code has set another experiment, MLflow would refuse the run. On a server that the
        code names while the job's run is in a file, the start makes a new run.
        """
        if (run_id := self._run_id) is None:
            return
        compat.keep_run_open_at_exit()

        @replacing(fluent, "start_run")
        def attach(start_run: Any, *args: Any, **kwargs: Any) -> Any:
            if fluent.active_run() is None:
                if self._is_other_server(_tracking_uri()):
                    os.environ.pop(variables.RUN_ID, None)
                    compat.end_run_at_exit()
                else:
                    os.environ[variables.RUN_ID] = run_id
                    compat.forget_active_experiment()
            return start_run(*args, **kwargs)

        mlflow: Any = sys.modules["mlflow"]
        if hasattr(mlflow, "start_run"):  # not yet while it is being imported
            mlflow.start_run = attach

    def change_model_logging(self, module: Any) -> None:
        """Have a rank that does not log save no models either, because that takes long."""
        log = module.Model.log.__func__

        @functools.wraps(log)
        def log_or_skip(cls: Any, artifact_path: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._logs():
                return log(cls, artifact_path, *args, **kwargs)
            name, active = kwargs.get("name") or artifact_path, import_module("mlflow").active_run()
            run_id = kwargs.get("run_id") or (active.info.run_id if active else None)
            return cls(artifact_path=name, run_id=run_id).get_model_info()

        module.Model.log = classmethod(log_or_skip)

    def change_registration(self, mlflow: Any) -> None:
        """Have a rank that does not log register no models: MLflow would look for saved files."""
        if not hasattr(mlflow, "register_model"):
            return  # MLflow is installed for tracing only

        @replacing(mlflow, "register_model")
        def register(original: Any, model_uri: str, name: str, *args: Any, **kwargs: Any) -> Any:
            if self._logs():
                return original(model_uri, name, *args, **kwargs)
            return _make_model_version(name)


def _tracking_uri() -> str:
    return str(import_module("mlflow").get_tracking_uri())


def _is_server(uri: str) -> bool:
    return uri == "databricks" or ("://" in uri and not uri.startswith(variables.LOCAL_STORES))


class _LossReporter:
    """Prints that a server failed, and how many calls were lost."""

    def __init__(self) -> None:
        self._lost = 0

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


class _StoreProxy:
    """A store of MLflow whose methods that change something go through `_write`.

    It delegates by name. A subclass of MLflow's abstract store would need more than a hundred
    methods, and other ones in each version.
    """

    def __init__(self, store: Any, run_id: str | None = None) -> None:
        self._store = store
        self._run_id = run_id  # of the job

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
            return _make_run(run_id)

    def _write(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _FaultTolerantStore(_StoreProxy):
    """Drops what a failing server does not accept, and does not end the job's run."""

    def __init__(self, store: Any, run_id: str | None, losses: _LossReporter) -> None:
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


class _ReadOnlyStore(_StoreProxy):
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
        return compat.finished_operations() if name.endswith("_async") else None

    def create_run(self, experiment_id: str, *args: Any, **kwargs: Any) -> Any:
        run_id = uuid.uuid4().hex
        return self._keep(_make_run(run_id, experiment_id), run_id)

    def create_experiment(self, name: str, *args: Any, **kwargs: Any) -> str:
        experiment_id = str(uuid.uuid4().int % 10**18)
        self._keep(_make_experiment(experiment_id, name), experiment_id, name)
        return experiment_id

    def create_logged_model(
        self,
        experiment_id: str = "0",
        name: str | None = None,
        source_run_id: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        model_id, now = f"m-{uuid.uuid4().hex}", _now()
        model = import_module("mlflow.entities").LoggedModel(
            experiment_id,
            model_id,
            name or model_id,
            f"{NOWHERE}:/{model_id}",
            now,
            now,
            source_run_id=source_run_id,
        )
        return self._keep(model, model_id)

    def finalize_logged_model(self, model_id: str, *args: Any, **kwargs: Any) -> Any:
        return self._created.get(model_id)

    def start_trace(self, trace_info: Any) -> Any:
        return trace_info

    def create_registered_model(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return import_module("mlflow.entities.model_registry").RegisteredModel(name)

    def create_model_version(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._keep(_make_model_version(name), name)

    def _keep(self, created: Any, *keys: str) -> Any:
        self._created.update(dict.fromkeys(keys, created))
        return created


class _EmptyStore:
    """A store without network or files: it has every run and experiment that it is asked for."""

    supports_workspaces = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        verb = name.partition("_")[0]
        if verb == "search":
            return _find_nothing
        return (lambda *args, **kwargs: []) if verb == "list" else _raise_not_found

    def get_run(self, run_id: str) -> Any:
        return _make_run(run_id)

    def get_experiment(self, experiment_id: str, *args: Any) -> Any:
        return _make_experiment(experiment_id, experiment_id)

    def get_experiment_by_name(self, name: str, *args: Any) -> Any:
        return _make_experiment("0", name)


def _find_nothing(*args: Any, **kwargs: Any) -> Any:
    return import_module("mlflow.store.entities").PagedList([], None)


def _raise_not_found(*args: Any, **kwargs: Any) -> Any:
    raise import_module("mlflow.exceptions").MlflowException(
        "MLflow is off in this rank, because the run is not tracked: there is nothing to read.",
        error_code=import_module("mlflow.protos.databricks_pb2").RESOURCE_DOES_NOT_EXIST,
    )


def _is_server_error(error: Exception) -> bool:
    return getattr(error, "error_code", None) in variables.SERVER_ERRORS


def _make_run(run_id: str, experiment_id: str = "0") -> Any:
    """Return a running run that has no parameters, metrics or tags."""
    entities = import_module("mlflow.entities")
    info = entities.RunInfo(
        run_id=run_id,
        experiment_id=experiment_id,
        user_id="",
        status="RUNNING",
        start_time=_now(),
        end_time=None,
        lifecycle_stage="active",
        artifact_uri=f"{NOWHERE}:/{run_id}",
        run_name=run_id,
    )
    return entities.Run(info, entities.RunData())


def _make_experiment(experiment_id: str, name: str) -> Any:
    location = f"{NOWHERE}:/{experiment_id}"
    return import_module("mlflow.entities").Experiment(experiment_id, name, location, "active")


def _make_model_version(name: str) -> Any:
    return import_module("mlflow.entities.model_registry").ModelVersion(name, "0", _now())


def _now() -> int:
    return int(time.time() * 1000)
