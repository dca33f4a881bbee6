"""MLflow in a rank: it logs to the job's run or nowhere, and only the driver ends that run.

MLflow reaches everything outside its process through stores, which it makes by the scheme of an
address: for tracking, for registered models and for artifacts. Once a rank imports MLflow, the
three registries of stores are made to return stores of this module, whatever addresses the user's
code names:

- in a rank that logs, the real one; a server that fails costs a message and not the training, and
  no rank ends the job's run;
- in a rank that does not log, the real one for reading; what is written is dropped;
- if nothing is tracked, one that has nothing: no network, no files, no retries.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from distributor.core.text import counted
from distributor.node.worker.import_hooks import after_import

RUN, RANKS, NOTE = "MLFLOW_RUN_ID", "DISTRIBUTOR_MLFLOW_RANKS", "DISTRIBUTOR_MLFLOW_NOTE"
"""The variables that name the run, the ranks that log, and what rank 0 says if nobody can."""
FIRST, ALL, NAMED, NONE = "first", "all", "named", "none"
"""Which ranks log. ``NAMED``: there is no run for the job, and rank 0 logs to a server that its own
code or variables name. ``NONE``: nothing is logged, whatever the code names."""
LOCAL_STORES = ("sqlite:", "file:", "/", ".")
"""How the addresses of stores begin that are only on the machine where they are used."""
SERVERS_FAULTS = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
HASTE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""What ranks have where the user says nothing: MLflow's own bounds hold training up for minutes."""
UNSEEN = (
    "MLflow is off: no use of it was seen where the run was started, so there is no run to log to. "
    "Set MLFLOW_TRACKING_URI there, or import mlflow in the training function or script itself."
)
"""What rank 0 says if the driver said nothing."""
NOWHERE = "distributor-nowhere"
"""The scheme of what a store that has nothing tells of."""
GETTERS = frozenset(
    {"get_experiment", "get_experiment_by_name", "get_logged_model", "get_model_version"}
)
"""Methods that return something that may have been created in this process alone."""
READS = frozenset(
    {"batch", "calculate", "download", "filter", "find", "for", "get", "list", "load", "max"}
    | {"query", "resolve", "search", "supports", "verify"}
)
"""How the names of methods begin that change nothing in a store."""

Build = Callable[..., Any]


@dataclass(frozen=True)
class _Role:
    """What this rank does with MLflow.

    Parameters
    ----------
    whose : str
        Which ranks log.
    is_first : bool
        Whether this is rank 0.
    run_id : str or None
        The job's run.
    uri : str
        The store that has it.
    """

    whose: str
    is_first: bool
    run_id: str | None
    uri: str

    def logs(self, uri: str) -> bool:
        """Tell whether this rank logs to the store at an address."""
        if self.whose == NAMED and not _is_server(uri):
            return False
        if self.whose == ALL and not self.is_elsewhere(uri):
            return True
        return self.whose != NONE and self.is_first

    def is_elsewhere(self, uri: str) -> bool:
        """Tell whether the job's run is in a file, and this is a server that its code names."""
        return self.uri.startswith(LOCAL_STORES) and _is_server(uri)

    @property
    def tracked(self) -> bool:
        """Whether the job has a run."""
        return self.whose in (FIRST, ALL)


def _is_server(uri: str) -> bool:
    return uri == "databricks" or ("://" in uri and not uri.startswith(LOCAL_STORES))


def follow_run() -> None:
    """Have MLflow, once this rank imports it, log to the job's run, or nowhere."""
    env = os.environ
    whose, uri = env.get(RANKS, NAMED), env.get("MLFLOW_TRACKING_URI", "")
    role = _Role(whose, env["RANK"] == "0", env.get(RUN), uri)
    after: dict[str, Callable[[ModuleType], object]] = {
        "mlflow.tracking.fluent": functools.partial(_adapt, role),
        "mlflow.tracking._model_registry.fluent": functools.partial(_adapt_registering, role),
        "mlflow.models.model": functools.partial(_adapt_models, role),
    }
    for name, change in after.items():
        after_import(name, change)


def _adapt(role: _Role, fluent: ModuleType) -> None:
    for name, value in HASTE.items():
        os.environ.setdefault(name, value)
    if role.run_id is not None:
        atexit.unregister(fluent._safe_end_run)
        start_run = _attaching(role, role.run_id, fluent)
        for module in (fluent, sys.modules.get("mlflow")):
            if hasattr(module, "start_run"):
                module.start_run = start_run  # type: ignore[union-attr]
    complaint = _Complaint()
    open_store = functools.partial(_open, role, complaint)
    for registry in _registries():
        for scheme, build in list(registry._registry.items()):
            registry.register(scheme, functools.wraps(build, updated=())(open_store(build)))
    artifacts = _registries()[-1]
    artifacts.register(NOWHERE, lambda *args, **kwargs: _Silent(_Nowhere()))


def _registries() -> list[Any]:
    """Return MLflow's registries of stores: for tracking, models and artifacts."""
    tracking: Any = import_module("mlflow.tracking._tracking_service.utils")
    models: Any = import_module("mlflow.tracking._model_registry.utils")
    artifacts: Any = import_module("mlflow.store.artifact.artifact_repository_registry")
    return [
        tracking._tracking_store_registry,
        models._get_store_registry(),
        artifacts._artifact_repository_registry,
    ]


def _open(role: _Role, complaint: _Complaint, build: Build) -> Build:
    """Return what makes a store in place of `build`."""

    def open_store(*args: Any, **kwargs: Any) -> Any:
        # Artifacts may be read from elsewhere; they are written only below a run.
        uri = kwargs.get("store_uri") or _tracking_uri()
        logs = role.logs(uri)
        if "store_uri" in kwargs and not logs and not role.tracked:
            complaint.note()
            return _Silent(_Nowhere())
        store = build(*args, **kwargs)
        return _Forgiving(store, role.run_id, complaint) if logs else _Silent(store, role.run_id)

    return open_store


def _tracking_uri() -> str:
    mlflow: Any = import_module("mlflow")
    return str(mlflow.get_tracking_uri())


def _adapt_models(role: _Role, module: Any) -> None:
    """Have a rank that does not log save no models either, which takes long."""
    log = module.Model.log.__func__

    @functools.wraps(log)
    def log_or_not(cls: Any, artifact_path: Any = None, *args: Any, **given: Any) -> Any:
        if role.logs(_tracking_uri()):
            return log(cls, artifact_path, *args, **given)
        name, active = given.get("name") or artifact_path, import_module("mlflow").active_run()
        run_id = given.get("run_id") or (active.info.run_id if active else None)
        return cls(artifact_path=name, run_id=run_id).get_model_info()

    module.Model.log = classmethod(log_or_not)


def _adapt_registering(role: _Role, module: Any) -> None:
    """Have a rank that does not log register no models: it would first look for what it saved."""
    register = module._register_model

    @functools.wraps(register)
    def register_or_not(model_uri: str, name: str, *args: Any, **given: Any) -> Any:
        if role.logs(_tracking_uri()):
            return register(model_uri, name, *args, **given)
        return _model_version(name)

    module._register_model = register_or_not


def _attaching(role: _Role, run_id: str, fluent: Any) -> Callable[..., Any]:
    """Have every start attach to the job's run: MLflow forgets it after the first.

    An experiment that the rank's code has set is not the run's, and MLflow would refuse the run.
    On a server that the code names, while the job's run is in a file, the start makes a new run.
    """
    start_run = fluent.start_run

    @functools.wraps(start_run)
    def attach(*args: Any, **kwargs: Any) -> Any:
        if fluent.active_run() is None and not role.is_elsewhere(_tracking_uri()):
            os.environ[RUN] = run_id
            fluent._active_experiment_id = None
        elif fluent.active_run() is None:
            os.environ.pop(RUN, None)
            atexit.register(fluent._safe_end_run)
        return start_run(*args, **kwargs)

    return attach


class _Store:
    """Stands for a store of MLflow's; methods that change something go through `_write`."""

    def __init__(self, store: Any, run_id: str | None = None) -> None:
        self._store = store
        self._run_id = run_id

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # MLflow asks ``isinstance`` which protocol a store speaks
        return type(self._store)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name.startswith("_") or name.partition("_")[0] in READS or not callable(found):
            return found
        return functools.partial(self._write, name, found)

    def get_run(self, run_id: str) -> Any:
        """Return a run; the job's own even if the server does not answer."""
        try:
            return self._store.get_run(run_id)
        except Exception as error:
            if run_id != self._run_id or not _is_servers_fault(error):
                raise
            return _run(run_id)

    def _write(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _Forgiving(_Store):
    """Loses what a server does not take, and leaves it to the driver to end the job's run."""

    def __init__(self, store: Any, run_id: str | None, complaint: _Complaint) -> None:
        super().__init__(store, run_id)
        self._complaint = complaint

    def _write(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("create_"):
            return method(*args, **kwargs)  # what it returns is needed
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if not _is_servers_fault(error):
                raise
            self._complaint.hear(error)

    def update_run_info(
        self, run_id: str, run_status: Any, end_time: Any, run_name: Any = None
    ) -> Any:
        """Change a run's status and name; of the job's run only its name, if one is given."""
        if run_id == self._run_id:
            if run_name is None:
                return None
            run_status, end_time = import_module("mlflow.entities").RunStatus.RUNNING, None
        update = self._store.update_run_info
        return self._write("update_run_info", update, run_id, run_status, end_time, run_name)


class _Silent(_Store):
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
        if name.endswith("_async"):
            return import_module("mlflow.utils.async_logging.run_operations").RunOperations([])
        return None

    def create_run(self, experiment_id: str, *args: Any, **kwargs: Any) -> Any:
        run = _run(uuid.uuid4().hex, experiment_id)
        self._created[run.info.run_id] = run
        return run

    def create_experiment(self, name: str, *args: Any, **kwargs: Any) -> str:
        experiment = _experiment(str(uuid.uuid4().int % 10**18), name)
        self._created[experiment.experiment_id] = self._created[name] = experiment
        return str(experiment.experiment_id)

    def create_logged_model(self, *args: Any, **kwargs: Any) -> Any:
        model_id = f"m-{uuid.uuid4().hex}"
        self._created[model_id] = _logged_model(model_id, *args, **kwargs)
        return self._created[model_id]

    def finalize_logged_model(self, model_id: str, *args: Any, **kwargs: Any) -> Any:
        return self._created.get(model_id)

    def start_trace(self, trace_info: Any) -> Any:
        return trace_info

    def create_registered_model(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return import_module("mlflow.entities.model_registry").RegisteredModel(name)

    def create_model_version(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._created[name] = _model_version(name)
        return self._created[name]


class _Nowhere:
    """A store that has nothing but what it is asked for by a name, and finds nothing else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = name.partition("_")[0]
        if kind == "search":
            return lambda *args, **kwargs: _no_page()
        if kind == "list":
            return lambda *args, **kwargs: []
        return _refuse

    def get_run(self, run_id: str) -> Any:
        return _run(run_id)

    def get_experiment(self, experiment_id: str, *args: Any) -> Any:
        return _experiment(experiment_id, experiment_id)

    def get_experiment_by_name(self, name: str, *args: Any) -> Any:
        return _experiment("0", name)

    supports_workspaces = False


def _no_page() -> Any:
    return import_module("mlflow.store.entities").PagedList([], None)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    exceptions: Any = import_module("mlflow.exceptions")
    codes: Any = import_module("mlflow.protos.databricks_pb2")
    raise exceptions.MlflowException(
        "MLflow is off in this rank: this run is not tracked, so there is nothing to be read.",
        error_code=codes.RESOURCE_DOES_NOT_EXIST,
    )


def _run(run_id: str, experiment_id: str = "0") -> Any:
    entities: Any = import_module("mlflow.entities")
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


def _experiment(experiment_id: str, name: str) -> Any:
    entities: Any = import_module("mlflow.entities")
    return entities.Experiment(experiment_id, name, f"{NOWHERE}:/{experiment_id}", "active")


def _logged_model(
    model_id: str,
    experiment_id: str = "0",
    name: str | None = None,
    source_run_id: str | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    entities: Any = import_module("mlflow.entities")
    where, now = f"{NOWHERE}:/{model_id}", _now()
    return entities.LoggedModel(
        experiment_id, model_id, name or model_id, where, now, now, source_run_id=source_run_id
    )


def _model_version(name: str) -> Any:
    entities: Any = import_module("mlflow.entities.model_registry")
    return entities.ModelVersion(name, "0", _now())


def _now() -> int:
    return int(time.time() * 1000)


def _is_servers_fault(error: Exception) -> bool:
    return getattr(error, "error_code", None) in SERVERS_FAULTS


class _Complaint:
    """What is said of a server that fails: once, and how much was lost at the end."""

    def __init__(self) -> None:
        self._lost = 0
        self._note = os.environ.get(NOTE, UNSEEN) if os.environ["RANK"] == "0" else ""

    def note(self) -> None:
        """Say why nothing is logged, if the driver has not said it; only rank 0 does, once."""
        if self._note:
            print(f"distributor: {self._note}", file=sys.stderr)
            self._note = ""

    def hear(self, error: Exception) -> None:
        """Take an error in place of the rank, and count it."""
        if not self._lost:
            print(
                f"distributor: MLflow's server did not take what was logged: {error}. Training "
                "goes on.",
                file=sys.stderr,
            )
            atexit.register(self._tell)
        self._lost += 1

    def _tell(self) -> None:
        lost = counted(self._lost, "call")
        print(f"distributor: {lost} did not reach MLflow.", file=sys.stderr)
