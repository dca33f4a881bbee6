"""MLflow: all ranks of a job log to one run, which the driver finds or makes. An extra."""

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
from typing import Any, TypeVar

from distributor.errors import DistributorError
from distributor.launch.console import warn
from distributor.node.mlflow_run import RANKS, RUN
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
HASTE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""What ranks have where the user says nothing: MLflow's own bounds hold training up for minutes."""
SERVERS = ("http://", "https://", "databricks")
FILES = ("sqlite:", "file:", "/", ".")
"""How the addresses of stores begin that are only on the machine where they are used."""
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


def rank_environment(tracking: Tracking | None, ranks: str) -> dict[str, str]:
    """Give the variables by which a job's ranks find its run.

    Parameters
    ----------
    tracking : Tracking or None
        The run; None where there is none.
    ranks : str
        Whose calls log: "first" or "all".
    """
    return {} if tracking is None else {**tracking.environment, RANKS: ranks}


def open_run(name: str, tags: Mapping[str, object], local_mode: bool) -> Tracking | None:
    """Find the run that is active here, or make one where a tracking server is set.

    Parameters
    ----------
    name : str
        For a new run.
    tags : mapping of str to object
        What is recorded of the job.
    local_mode : bool
        Whether the ranks are on this machine, and so can reach files that are only here.

    Returns
    -------
    Tracking or None
        None where MLflow is not installed, or not in use here, or its server does not answer.

    Raises
    ------
    DistributorError
        Where the server refuses the credentials.
    """
    if "mlflow" not in sys.modules and not (os.environ.get(URI) and find_spec("mlflow")):
        return None
    mlflow: Any = import_module("mlflow")
    active = mlflow.active_run()
    wished = active.info.run_id if active else os.environ.get(RUN)
    if wished is None and not mlflow.is_tracking_uri_set():
        return None
    uri = mlflow.get_tracking_uri()
    if wished is None and not uri.startswith(SERVERS):
        return None
    if not local_mode and uri.startswith(FILES):
        warn(
            f"The active MLflow run is in {uri}, where executors cannot log to it, so this job is "
            "not tracked. Use a tracking server (mlflow server; MLFLOW_TRACKING_URI)."
        )
        return None
    ours = {f"distributor.{key}": str(value) for key, value in tags.items()}

    def find() -> Tracking:
        client = mlflow.MlflowClient()
        if wished is None:
            experiment = mlflow.tracking.fluent._get_experiment_id()
            run = client.create_run(experiment, run_name=name, tags=ours)
        else:
            run = active or client.get_run(wished)
            recorded = [mlflow.entities.RunTag(key, value) for key, value in ours.items()]
            client.log_batch(wished, tags=recorded)
        return Tracking(run.info.run_id, run.info.experiment_id, uri, wished is None)

    try:
        return bounded(find)
    except Exception as error:
        if _refused(error):
            raise DistributorError(
                f"The MLflow server at {uri} refuses the credentials: {brief(error)}. Set "
                "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; "
                "for Databricks DATABRICKS_HOST and DATABRICKS_TOKEN, or a profile."
            ) from error
        warn(
            f"The MLflow server at {uri} cannot be had, so this run is not tracked: {brief(error)}"
        )
        return None


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
