"""MLflow on the driver: finds or creates the run that all ranks of a job log to.

MLflow is an optional dependency, and is imported only if the job uses it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from distributor._compat.mlflow import databricks_credentials, default_experiment_id
from distributor.core.rank_variables import (
    HTTP_DEFAULTS,
    LOCAL_STORES,
    LOGGING_RANKS,
    NAMED_SERVER,
    NO_RANK,
    OFF_REASON,
    RUN_ID,
    USE_NOT_DETECTED,
)
from distributor.core.text import first_line
from distributor.errors import DistributorError
from distributor.screen.messages import warn
from distributor.version import __version__

T = TypeVar("T")
URI, EXPERIMENT_ID = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"
CREDENTIALS = (
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_INSECURE_TLS",
    "MLFLOW_TRACKING_SERVER_CERT_PATH",
    "MLFLOW_TRACKING_CLIENT_CERT_PATH",
    "MLFLOW_TRACKING_AWS_SIGV4",
    "MLFLOW_TRACKING_AUTH",
    "DATABRICKS_HOST",
    "DATABRICKS_TOKEN",
    "DATABRICKS_CONFIG_PROFILE",
)
"""Variables with which MLflow's client authenticates itself."""
SERVER_SCHEMES = ("http://", "https://", "databricks")
SERVER_ADVICE = "start a tracking server (mlflow server) and set MLFLOW_TRACKING_URI to its address"
ANSWER_SECONDS = 15.0
"""Seconds that the driver waits for the server at the start and at the end of a run."""


@dataclass(frozen=True)
class TrackedRun:
    """The MLflow run of a job."""

    run_id: str
    experiment_id: str
    uri: str  # of the store
    created_for_job: bool  # so that it ends with the job

    @property
    def environment(self) -> dict[str, str]:
        """The variables that ranks need to find the run and to authenticate themselves."""
        own = {n: os.environ[n] for n in (*CREDENTIALS, *HTTP_DEFAULTS) if n in os.environ}
        return {
            **HTTP_DEFAULTS,
            **own,
            **_databricks_variables(self.uri),
            URI: self.uri,
            RUN_ID: self.run_id,
            EXPERIMENT_ID: self.experiment_id,
        }

    @property
    def link(self) -> str:
        """The run's page; for a store that is no server, its address and the run."""
        place = f"experiments/{self.experiment_id}/runs/{self.run_id}"
        if self.uri.startswith("databricks"):
            host = _databricks_variables(self.uri).get("DATABRICKS_HOST", self.uri)
            return f"{host.rstrip('/')}/ml/{place}"
        if self.uri.startswith(SERVER_SCHEMES):
            return f"{self.uri.rstrip('/')}/#/{place}"
        return f"{self.uri} {place}"


@dataclass(frozen=True)
class Untracked:
    """A job without an MLflow run, so that MLflow is off in its ranks."""

    logging_ranks: (
        str  # `NAMED_SERVER` if rank 0 may log to one that its own code names, or `NO_RANK`
    )
    reason: str = (
        ""  # what rank 0 prints if it uses MLflow nevertheless; empty: the driver has warned
    )


def rank_environment(tracking: TrackedRun | Untracked, ranks: str) -> dict[str, str]:
    """Return the variables by which a job's ranks find its run, or know that there is none.

    `ranks` are those that log: "first" or "all".
    """
    if isinstance(tracking, Untracked):
        if tracking == Untracked(NAMED_SERVER, USE_NOT_DETECTED):
            return {}  # the default in ranks
        return {LOGGING_RANKS: tracking.logging_ranks, OFF_REASON: tracking.reason}
    return {**tracking.environment, LOGGING_RANKS: ranks}


def describe_job(run_id: str, launch: Mapping[str, object]) -> dict[str, object]:
    """Return the facts about a job, and what its launcher says of itself, for `open_run`."""
    named = {f"version.{package}": number for package, number in _versions().items()}
    return {"run_id": run_id, "attempt": 0, **launch, **named}


@functools.cache  # importlib.metadata remembers each state of the folders that it has searched
def _versions() -> Mapping[str, str]:
    from importlib import metadata  # slow to import

    versions = {"distributor": __version__, "python": platform.python_version()}
    for package in ("torch", "pyspark"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def open_run(
    name: str, tags: Mapping[str, object], shares_disk: bool, uses_mlflow: Callable[[], bool]
) -> TrackedRun | Untracked:
    """Find the run that is active on the driver, or create one for a job that uses MLflow.

    A run is created if a tracking URI is set. It is also created if the program mentions MLflow:
    then in the default store, as MLflow itself would do. Untracked is returned if MLflow is not
    installed or not in use on the driver, if its server does not answer, or if its store is a file
    that the ranks cannot access. A server that refuses the credentials is an error.
    """
    if "mlflow" not in sys.modules and not (os.environ.get(URI) or uses_mlflow()):
        return Untracked(NAMED_SERVER, USE_NOT_DETECTED)
    if find_spec("mlflow") is None:
        return Untracked(NAMED_SERVER, "MLflow is off: it is not installed on the driver.")
    mlflow: Any = import_module("mlflow")
    active = mlflow.active_run()
    existing = active.info.run_id if active else os.environ.get(RUN_ID)
    if not (existing or mlflow.is_tracking_uri_set() or uses_mlflow()):
        return Untracked(NAMED_SERVER, USE_NOT_DETECTED)
    uri = _absolute_uri(mlflow.get_tracking_uri())
    if not shares_disk and uri.startswith(LOCAL_STORES):
        what = "The active MLflow run is in" if active else "MLflow's store is"
        warn(
            f"{what} {uri}, which executors cannot access, so this run is not tracked and MLflow "
            f"is off in its ranks. To track it, {SERVER_ADVICE}."
        )
        return Untracked(NAMED_SERVER)

    def find_or_create() -> TrackedRun:
        client = mlflow.MlflowClient(uri)
        job_tags = {f"distributor.{key}": str(value) for key, value in tags.items()}
        if existing is None:
            run = client.create_run(default_experiment_id(), run_name=name, tags=job_tags)
        else:
            run = active or client.get_run(existing)
            recorded = [mlflow.entities.RunTag(key, value) for key, value in job_tags.items()]
            client.log_batch(existing, tags=recorded)
        return TrackedRun(run.info.run_id, run.info.experiment_id, uri, existing is None)

    try:
        # Creating a store in a file may take many seconds, but it does not hang.
        is_local = uri.startswith(LOCAL_STORES)
        return find_or_create() if is_local else call_with_deadline(find_or_create)
    except Exception as error:
        return _untracked_after(error, uri)


def _untracked_after(error: Exception, uri: str) -> Untracked:
    """Warn that the store failed, or raise if it refuses the credentials."""
    if _is_unauthorized(error):
        raise DistributorError(
            f"The MLflow server at {uri} refuses the credentials: {first_line(error)}. Set "
            "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; "
            "for Databricks DATABRICKS_HOST and DATABRICKS_TOKEN, or a profile."
        ) from error
    kind = "store" if uri.startswith(LOCAL_STORES) else "server"
    warn(
        f"The MLflow {kind} at {uri} cannot be reached, so this run is not tracked and MLflow "
        f"is off in its ranks: {first_line(error)}"
    )
    return Untracked(NO_RANK)


def _absolute_uri(uri: str) -> str:
    """Make the address of a file independent of the working folder, which ranks may not share."""
    for scheme in ("sqlite:///", "file:"):
        path = uri.removeprefix(scheme)
        if path != uri and not path.startswith("/") and path != ":memory:":
            return f"{scheme}{os.path.abspath(path)}"
    is_path = uri and ":" not in uri and uri != "databricks"
    return Path(uri).absolute().as_uri() if is_path else uri


def call_with_deadline(function: Callable[[], T]) -> T:
    """Call the server for at most `ANSWER_SECONDS`: MLflow itself would retry for minutes.

    After a TimeoutError, the call goes on in the background.
    """
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="mlflow", daemon=True).start()
    wait([answer], ANSWER_SECONDS)
    if not answer.done():
        raise TimeoutError(f"no answer within {ANSWER_SECONDS:g} s")
    return answer.result()


def _is_unauthorized(error: BaseException | None) -> bool:
    """Return whether a server's refusal (401 or 403) is this error, or has caused it."""
    if error is None:
        return False
    status = getattr(error, "get_http_status_code", lambda: None)()
    in_text = re.search(r"(code|status) (401|403)\b", str(error)) is not None
    return in_text or status in (401, 403) or _is_unauthorized(error.__cause__ or error.__context__)


def _databricks_variables(uri: str) -> dict[str, str]:
    """Return the variables for a profile, which is in a file that only this machine may have."""
    if not uri.startswith("databricks"):
        return {}
    try:
        found = databricks_credentials(uri)
    except Exception as error:
        warn(f"The credentials for {uri} could not be resolved on the driver: {error}")
        return {}
    pairs = {"DATABRICKS_HOST": found.host, "DATABRICKS_TOKEN": found.token}
    return {name: value for name, value in pairs.items() if value}
