"""MLflow on the driver: finds or makes the run that all ranks of a job log to. An extra."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from distributor.errors import DistributorError
from distributor.launch.console import warn
from distributor.node.worker.mlflow_hooks import (
    HASTE,
    LOCAL_STORES,
    NAMED,
    NONE,
    NOTE,
    RANKS,
    RUN,
    UNSEEN,
)
from distributor.version import __version__

T = TypeVar("T")
URI, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"
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
"""Variables by which MLflow's client proves who it is."""
SERVERS = ("http://", "https://", "databricks")
SET_SERVER = "start a tracking server (mlflow server) and set MLFLOW_TRACKING_URI to its address"
ANSWER_SECONDS = 15.0
"""Seconds that the driver waits for the server at the start of a run, and at its end."""


@dataclass(frozen=True)
class Tracking:
    """The MLflow run of a job.

    Parameters
    ----------
    run_id, experiment_id, uri : str
        The run, and where it is.
    made_for_job : bool
        Whether it was made for the job, so that the job's end is its end.
    """

    run_id: str
    experiment_id: str
    uri: str
    made_for_job: bool

    @property
    def environment(self) -> dict[str, str]:
        """What its ranks need: where the run is, and what proves who they are."""
        given = {name: os.environ[name] for name in (*CREDENTIALS, *HASTE) if name in os.environ}
        return {
            **HASTE,
            **given,
            **_databricks(self.uri),
            URI: self.uri,
            RUN: self.run_id,
            EXPERIMENT: self.experiment_id,
        }

    @property
    def link(self) -> str:
        """Where people look at it; for a store that is no server, its address and the run."""
        place = f"experiments/{self.experiment_id}/runs/{self.run_id}"
        if self.uri.startswith("databricks"):
            host = _databricks(self.uri).get("DATABRICKS_HOST", self.uri)
            return f"{host.rstrip('/')}/ml/{place}"
        if self.uri.startswith(SERVERS):
            return f"{self.uri.rstrip('/')}/#/{place}"
        return f"{self.uri} {place}"


@dataclass(frozen=True)
class Untracked:
    """A job without an MLflow run, so that MLflow is off in its ranks.

    Parameters
    ----------
    ranks : str
        ``NAMED`` if rank 0 may log to a server that its own code names, ``NONE`` if it may not.
    note : str
        What rank 0 says if it uses MLflow all the same; empty if it was said here.
    """

    ranks: str
    note: str = ""


def rank_environment(tracking: Tracking | Untracked, ranks: str) -> dict[str, str]:
    """Return the variables by which a job's ranks find its run, or know that there is none.

    Parameters
    ----------
    tracking : Tracking or Untracked
        The run, or why there is none.
    ranks : str
        Whose calls log: "first" or "all".
    """
    if isinstance(tracking, Untracked):
        if tracking == Untracked(NAMED, UNSEEN):
            return {}  # what a rank takes for granted
        return {RANKS: tracking.ranks, NOTE: tracking.note}
    return {**tracking.environment, RANKS: ranks}


def open_run(
    name: str, tags: Mapping[str, object], shares_disk: bool, mentioned: Callable[[], bool]
) -> Tracking | Untracked:
    """Find the run that is active here, or make one for a job that uses MLflow.

    A run is made if a tracking URI is set, or, as MLflow itself would make it, in the default
    store in the working folder if the program mentions MLflow.

    Parameters
    ----------
    name : str
        For a new run.
    tags : mapping of str to object
        What is recorded of the job.
    shares_disk : bool
        Whether the ranks reach files that are here.
    mentioned : callable
        Tells whether the program mentions MLflow; called only if it matters.

    Returns
    -------
    Tracking or Untracked
        Untracked if MLflow is not installed, or not in use here, or its server does not answer, or
        its store is a file that the ranks do not reach.

    Raises
    ------
    DistributorError
        If the server refuses the credentials.
    """
    if "mlflow" not in sys.modules and not (os.environ.get(URI) or mentioned()):
        return Untracked(NAMED, UNSEEN)
    if find_spec("mlflow") is None:
        return Untracked(NAMED, "MLflow is off: it is not installed where the run was started.")
    mlflow: Any = import_module("mlflow")
    active = mlflow.active_run()
    wished = active.info.run_id if active else os.environ.get(RUN)
    if not (wished or mlflow.is_tracking_uri_set() or mentioned()):
        return Untracked(NAMED, UNSEEN)
    uri = _absolute(mlflow.get_tracking_uri())
    if not shares_disk and uri.startswith(LOCAL_STORES):
        what = "The active MLflow run is in" if active else "MLflow's store is"
        warn(
            f"{what} {uri}, where executors cannot log to it, so this run is not tracked and "
            f"MLflow is off in its ranks. To track it, {SET_SERVER}."
        )
        return Untracked(NAMED)
    ours = {f"distributor.{key}": str(value) for key, value in tags.items()}

    def find() -> Tracking:
        client = mlflow.MlflowClient(uri)
        if wished is None:
            experiment = mlflow.tracking.fluent._get_experiment_id()
            run = client.create_run(experiment, run_name=name, tags=ours)
        else:
            run = active or client.get_run(wished)
            recorded = [mlflow.entities.RunTag(key, value) for key, value in ours.items()]
            client.log_batch(wished, tags=recorded)
        return Tracking(run.info.run_id, run.info.experiment_id, uri, wished is None)

    try:
        # Making a store in a file may take seconds, but it ends.
        return find() if uri.startswith(LOCAL_STORES) else bounded(find)
    except Exception as error:
        if _refused(error):
            raise DistributorError(
                f"The MLflow server at {uri} refuses the credentials: {brief(error)}. Set "
                "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; "
                "for Databricks DATABRICKS_HOST and DATABRICKS_TOKEN, or a profile."
            ) from error
        kind = "store" if uri.startswith(LOCAL_STORES) else "server"
        warn(
            f"The MLflow {kind} at {uri} cannot be reached, so this run is not tracked and MLflow "
            f"is off in its ranks: {brief(error)}"
        )
        return Untracked(NONE)


def _absolute(uri: str) -> str:
    """Make the address of a file independent of the working folder, which ranks may not share."""
    for scheme in ("sqlite:///", "file:"):
        path = uri.removeprefix(scheme)
        if path != uri and not path.startswith("/") and path != ":memory:":
            return f"{scheme}{os.path.abspath(path)}"
    is_path = uri and ":" not in uri and uri != "databricks"
    return Path(uri).absolute().as_uri() if is_path else uri


def bounded(ask: Callable[[], T]) -> T:
    """Ask the server, but not for longer than a while: MLflow itself would try for minutes."""
    answers: list[T] = []
    errors: list[Exception] = []

    def follow() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=follow, name="mlflow", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {ANSWER_SECONDS:g} s")
    return answers[0]


def _refused(error: BaseException | None) -> bool:
    """Tell whether this is, or came of, a server's word that we may not."""
    if error is None:
        return False
    status = getattr(error, "get_http_status_code", lambda: None)()
    told = re.search(r"(code|status) (401|403)\b", str(error)) is not None
    return told or status in (401, 403) or _refused(error.__cause__ or error.__context__)


def brief(error: BaseException) -> str:
    """Give the first line of an error: a server's may be a page of HTML."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def _databricks(uri: str) -> dict[str, str]:
    """Resolve a profile, which is a file of this machine, to what it holds."""
    if not uri.startswith("databricks"):
        return {}
    try:
        utils: Any = import_module("mlflow.utils.databricks_utils")
        found = utils.get_databricks_host_creds(uri)
    except Exception as error:
        warn(f"The credentials for {uri} could not be resolved here: {error}")
        return {}
    pairs = {"DATABRICKS_HOST": found.host, "DATABRICKS_TOKEN": found.token}
    return {name: value for name, value in pairs.items() if value}


def tags_of(run_id: str, where: Mapping[str, object]) -> dict[str, object]:
    """Say what is recorded of a job.

    Parameters
    ----------
    run_id : str
        The job's run.
    where : mapping of str to object
        What its launcher says of itself.
    """
    versions = {"distributor": __version__, "python": platform.python_version()}
    for package in ("torch", "pyspark"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    named = {f"version.{package}": number for package, number in versions.items()}
    return {"run_id": run_id, "attempt": 0, **where, **named}
