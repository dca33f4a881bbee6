"""Makes MLflow in a rank log to the job's run, or nowhere; only the driver ends that run.

MLflow reaches everything outside its process through stores: for tracking, for registered models
and for artifacts. Its registries build a store by the scheme of an address. Once a rank imports
MLflow, the public methods of these registries return a store of `mlflow_stores`, whatever address
the user's code names:

- in a rank that logs, MLflow's own store; if the server fails, training continues;
- in a rank that does not log, MLflow's own store for reading, while writes are dropped;
- if nothing is tracked, an empty store: no network, no files, no retries.

A store for a URI scheme of this package, registered as a plugin, would not be enough: the user's
code may name any address, and a plugin that takes over a built-in scheme cannot build its store.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from distributor._compat import mlflow as compat
from distributor.core.mlflow_env import (
    ALL,
    FIRST,
    HTTP_DEFAULTS,
    LOCAL_STORES,
    LOGGING_RANKS,
    NAMED_SERVER,
    NO_RANK,
    RUN_ID,
)
from distributor.node.worker.mlflow_entities import NOWHERE, make_model_version
from distributor.node.worker.mlflow_stores import (
    EmptyStore,
    FaultTolerantStore,
    LossReporter,
    ReadOnlyStore,
    StoreProxy,
)
from distributor.rank.import_hooks import after_import

STORE_GROUPS = ("mlflow.tracking_store", "mlflow.model_registry_store")
"""The registries of stores that are replaced, by the groups in which plugins extend them."""


@dataclass(frozen=True)
class LoggingRole:
    """Which stores a rank logs to.

    Parameters
    ----------
    logging_ranks : str
        Which ranks log, as in `mlflow_env`.
    is_rank_0 : bool
        Whether this is rank 0.
    run_id : str or None
        The job's run.
    job_uri : str
        The address of the store that has the job's run.
    """

    logging_ranks: str
    is_rank_0: bool
    run_id: str | None
    job_uri: str

    @classmethod
    def of_this_rank(cls) -> LoggingRole:
        """Read the role from the environment that the driver has prepared."""
        env = os.environ
        return cls(
            logging_ranks=env.get(LOGGING_RANKS, NAMED_SERVER),
            is_rank_0=env["RANK"] == "0",
            run_id=env.get(RUN_ID),
            job_uri=env.get("MLFLOW_TRACKING_URI", ""),
        )

    @property
    def is_tracked(self) -> bool:
        """Whether the job has a run."""
        return self.logging_ranks in (FIRST, ALL)

    def logs_to(self, uri: str) -> bool:
        """Return whether this rank logs to the store at an address."""
        if self.logging_ranks == NAMED_SERVER and not _is_server(uri):
            return False
        if self.logging_ranks == ALL and not self.is_other_server(uri):
            return True
        return self.logging_ranks != NO_RANK and self.is_rank_0

    def logs(self) -> bool:
        """Return whether this rank logs to the store that is set now."""
        return self.logs_to(_tracking_uri())

    def is_other_server(self, uri: str) -> bool:
        """Return whether the job's run is in a file, and this is a server that the code names."""
        return self.job_uri.startswith(LOCAL_STORES) and _is_server(uri)


def install_mlflow_hooks() -> None:
    """Have MLflow log to the job's run, or nowhere, once this rank imports it."""
    role, losses = LoggingRole.of_this_rank(), LossReporter()
    hooks: dict[str, Callable[[LoggingRole, LossReporter, Any], object]] = {
        "mlflow": _change_registration,
        "mlflow.models.model": _change_model_logging,
        "mlflow.store.artifact.artifact_repository_registry": _change_artifact_stores,
        "mlflow.tracking.fluent": _change_runs,
        "mlflow.tracking.registry": _change_stores,
    }
    for name, change in hooks.items():
        after_import(name, functools.partial(change, role, losses))


def _change_stores(role: LoggingRole, losses: LossReporter, module: Any) -> None:
    """Replace the stores for tracking and registered models."""
    get_builder = module.StoreRegistry.get_store_builder

    @functools.wraps(get_builder)
    def get_store_builder(registry: Any, store_uri: str) -> Any:
        build = get_builder(registry, store_uri)
        if registry.group_name not in STORE_GROUPS:
            return build

        @functools.wraps(build, updated=())  # the registry looks at the parameters
        def build_proxy(*args: Any, **kwargs: Any) -> StoreProxy:
            logs = role.logs_to(store_uri)
            if not logs and not role.is_tracked:
                losses.report_off()
                return ReadOnlyStore(EmptyStore())
            # Not at the import of MLflow, which may have been in the zygote, for another run.
            for name, value in HTTP_DEFAULTS.items():
                os.environ.setdefault(name, value)
            return _proxy(role, losses, build(*args, **kwargs), logs=logs)

        return build_proxy

    module.StoreRegistry.get_store_builder = get_store_builder


def _change_artifact_stores(role: LoggingRole, losses: LossReporter, module: Any) -> None:
    """Replace the stores for artifacts, which may be read anywhere and are written below runs."""
    get_repository = module.ArtifactRepositoryRegistry.get_artifact_repository

    @functools.wraps(get_repository)
    def get_artifact_repository(registry: Any, artifact_uri: str, *args: Any, **kwargs: Any) -> Any:
        if str(artifact_uri).startswith(f"{NOWHERE}:"):
            return ReadOnlyStore(EmptyStore())
        store = get_repository(registry, artifact_uri, *args, **kwargs)
        return _proxy(role, losses, store, logs=role.logs())

    module.ArtifactRepositoryRegistry.get_artifact_repository = get_artifact_repository


def _proxy(role: LoggingRole, losses: LossReporter, store: Any, *, logs: bool) -> StoreProxy:
    if logs:
        return FaultTolerantStore(store, role.run_id, losses)
    return ReadOnlyStore(store, role.run_id)


def _change_runs(role: LoggingRole, _: LossReporter, fluent: Any) -> None:
    """Have every start of a run attach to the job's run: MLflow forgets it after the first.

    If the code has set another experiment, MLflow would refuse the run. On a server that the code
    names while the job's run is in a file, the start makes a new run.
    """
    if (run_id := role.run_id) is None:
        return
    compat.keep_run_open_at_exit()
    start_run = fluent.start_run

    @functools.wraps(start_run)
    def attach(*args: Any, **kwargs: Any) -> Any:
        if fluent.active_run() is None:
            if role.is_other_server(_tracking_uri()):
                os.environ.pop(RUN_ID, None)
                compat.end_run_at_exit()
            else:
                os.environ[RUN_ID] = run_id
                compat.forget_active_experiment()
        return start_run(*args, **kwargs)

    modules: list[Any] = [fluent, sys.modules["mlflow"]]
    for module in modules:
        if hasattr(module, "start_run"):  # not yet in MLflow itself while it is being imported
            module.start_run = attach


def _change_model_logging(role: LoggingRole, _: LossReporter, module: Any) -> None:
    """Have a rank that does not log save no models either, because that takes long."""
    log = module.Model.log.__func__

    @functools.wraps(log)
    def log_or_skip(cls: Any, artifact_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        if role.logs():
            return log(cls, artifact_path, *args, **kwargs)
        name, active = kwargs.get("name") or artifact_path, import_module("mlflow").active_run()
        run_id = kwargs.get("run_id") or (active.info.run_id if active else None)
        return cls(artifact_path=name, run_id=run_id).get_model_info()

    module.Model.log = classmethod(log_or_skip)


def _change_registration(role: LoggingRole, _: LossReporter, mlflow: Any) -> None:
    """Have a rank that does not log register no models: MLflow would look for the saved files."""
    register = getattr(mlflow, "register_model", None)
    if register is None:
        return  # MLflow is installed for tracing only

    @functools.wraps(register)
    def register_or_skip(model_uri: str, name: str, *args: Any, **kwargs: Any) -> Any:
        if role.logs():
            return register(model_uri, name, *args, **kwargs)
        return make_model_version(name)

    mlflow.register_model = register_or_skip


def _tracking_uri() -> str:
    mlflow: Any = import_module("mlflow")
    return str(mlflow.get_tracking_uri())


def _is_server(uri: str) -> bool:
    return uri == "databricks" or ("://" in uri and not uri.startswith(LOCAL_STORES))
