"""MLflow on the driver: the run that all ranks of a job log to, and what is recorded in it.

MLflow is an optional dependency, and is imported only if the job uses it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from distributor._compat.mlflow import (
    client_that_prints_no_link,
    databricks_credentials,
    default_experiment_id,
)
from distributor.core.rank_variables import (
    HTTP_DEFAULTS,
    LOCAL_STORES,
    LOGGING_RANKS,
    NAMED_SERVER,
    NO_RANK,
    OFF_REASON,
    RUN_ID,
    SERVER_ERRORS,
    USE_NOT_DETECTED,
)
from distributor.core.text import Redaction, counted, first_line, printable
from distributor.core.threads import in_background
from distributor.errors import DistributorError, RunCancelled
from distributor.rank.messages import Progress
from distributor.screen.messages import RunLabel, notify, warn
from distributor.settings import Listener
from distributor.version import __version__
from distributor.wire.messages import Stream

T = TypeVar("T")
PARENT_TAG = "mlflow.parentRunId"
"""Of a run inside another: https://mlflow.org/docs/latest/api_reference/rest-api.html"""
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
MAX_TAG = 4000
"""Characters of an error that a tag holds."""
MAX_OUTPUT = 64 * 1024
"""Bytes of each rank's latest output that are recorded if a run fails."""
MAX_RANKS_WITH_OUTPUT = 64
"""Number of ranks, from rank 0 on, whose output is recorded."""
MAX_BATCH = 1000
"""Metrics that a server accepts in one request."""
SEND_INTERVAL = 1.0
"""Seconds between two batches."""
MAX_PENDING = 500_000
"""Metrics that wait for a server that does not accept them; beyond it the oldest are dropped."""
INVALID_IN_NAME = re.compile(r"[^\w\-./: ]")
"""Characters that a metric's name cannot have."""


@dataclass(frozen=True)
class TrackedRun:
    """The MLflow run of a job."""

    run_id: str
    experiment_id: str
    uri: str  # of the store
    created_for_job: bool  # so that it ends with the job

    def rank_environment(self, ranks: str) -> dict[str, str]:
        """Return the variables that ranks need to find the run and to authenticate themselves.

        `ranks` are those that log: "first" or "all".
        """
        own = {n: os.environ[n] for n in (*CREDENTIALS, *HTTP_DEFAULTS) if n in os.environ}
        return {
            **HTTP_DEFAULTS,
            **own,
            **_databricks_variables(self.uri),
            URI: self.uri,
            RUN_ID: self.run_id,
            EXPERIMENT_ID: self.experiment_id,
            LOGGING_RANKS: ranks,
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

    # `NAMED_SERVER` if rank 0 may log to one that its own code names, or `NO_RANK`.
    logging_ranks: str
    # What rank 0 prints if it uses MLflow nevertheless; empty: the driver has warned.
    reason: str = ""

    def rank_environment(self, ranks: str) -> dict[str, str]:
        """Return the variables by which ranks know that there is no run."""
        if self == Untracked(NAMED_SERVER, USE_NOT_DETECTED):
            return {}  # the default in ranks
        return {LOGGING_RANKS: self.logging_ranks, OFF_REASON: self.reason}


@functools.cache  # importlib.metadata remembers each state of the folders that it has searched
def _versions() -> Mapping[str, str]:
    from importlib import metadata  # slow to import

    versions = {"version.distributor": __version__, "version.python": platform.python_version()}
    for package in ("torch", "pyspark"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[f"version.{package}"] = metadata.version(package)
    return versions


def open_run(
    name: str, facts: Mapping[str, object], shares_disk: bool, uses_mlflow: Callable[[], bool]
) -> TrackedRun | Untracked:
    """Find the run that is active on the driver, or create one for a job that uses MLflow.

    Its tags are the facts about the job, and the versions of packages.

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
        job_tags = _tags_of({**facts, **_versions()})
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


def _tags_of(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the tags of a new run."""
    return {f"distributor.{key}": str(value) for key, value in {"attempt": 0, **facts}.items()}


def open_child(
    parent: TrackedRun, name: str, facts: Mapping[str, object], params: Mapping[str, object]
) -> TrackedRun | Untracked:
    """Create a run inside another one, with parameters and facts as its tags."""
    mlflow: Any = import_module("mlflow")
    tags = {**_tags_of(facts), PARENT_TAG: parent.run_id}

    def create() -> TrackedRun:
        client = mlflow.MlflowClient(parent.uri)
        run = client.create_run(parent.experiment_id, run_name=name, tags=tags)
        recorded = [mlflow.entities.Param(key, str(value)) for key, value in params.items()]
        client.log_batch(run.info.run_id, params=recorded)
        return TrackedRun(run.info.run_id, parent.experiment_id, parent.uri, created_for_job=True)

    try:
        return call_with_deadline(create)
    except Exception as error:
        return _untracked_after(error, parent.uri)


def end_child(child: TrackedRun, metrics: Mapping[str, float], status: str) -> None:
    """Record the last metrics of a run, and how it has ended."""
    mlflow: Any = import_module("mlflow")
    client, now = client_that_prints_no_link(child.uri), int(time.time() * 1000)
    recorded = [mlflow.entities.Metric(name, value, now, 0) for name, value in metrics.items()]
    client.log_batch(child.run_id, metrics=recorded)
    client.set_terminated(child.run_id, status)


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
    answer = in_background(function, "mlflow")
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
        host, token = databricks_credentials(uri)
    except Exception as error:
        warn(f"The credentials for {uri} could not be resolved on the driver: {error}")
        return {}
    pairs = {"DATABRICKS_HOST": host, "DATABRICKS_TOKEN": token}
    return {name: value for name, value in pairs.items() if value}


class Recorder(Listener):
    """Records a job in its MLflow run, and ends the run with the job; a context manager.

    `ranks` are those whose metrics are recorded: "first" or "all". With "all", each metric has its
    rank in its name: ``loss/rank_3``.
    """

    def __init__(self, run: TrackedRun, ranks: str, redaction: Redaction, label: RunLabel) -> None:
        self._run = run
        self._records_all = ranks == "all"
        self._redaction = redaction
        self._label = label
        self._mlflow: Any = import_module("mlflow")
        self._client = client_that_prints_no_link(run.uri)
        self._queue = MetricsQueue(self._send)
        self._output: defaultdict[int, bytearray] = defaultdict(bytearray)
        self._has_ended = False
        self.save_page: Callable[[Path], object] | None = None

    def __enter__(self) -> None:
        notify(self._label.message(f"MLflow run: {self._run.link}"))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if lost := self._queue.close():
            values = f"{counted(lost, 'value')} of metrics"
            warn(f"{values} did not reach the MLflow run {self._run.run_id}.")
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """End the MLflow run, and record the error then: a slow store may not do both in time."""
        if self._has_ended:
            return
        self._has_ended, status = True, _status(error)
        run_id = self._run.run_id
        is_reached = not self._run.created_for_job or self._call(
            f"be ended as {status}", lambda: self._client.set_terminated(run_id, status)
        )
        if error is not None and is_reached:
            self._call("record the error", lambda: self._record_error(error))
        if is_reached and (save := self.save_page):
            self._call("receive the page of the run", lambda: self._log_page(save))

    def _call(self, what: str, call: Callable[[], object]) -> bool:
        """Call the server; warn and return False if that fails."""
        try:
            call_with_deadline(call)
        except Exception as problem:
            warn(f"The MLflow run {self._run.run_id} could not {what}: {first_line(problem)}")
            return False
        return True

    def _set_tags(self, **tags: object) -> None:
        for name, value in tags.items():
            self._client.set_tag(self._run.run_id, f"distributor.{name}", value)

    def begins(self, attempt: int, ranks: int) -> None:
        """Record the number of a further attempt; the run is created with that of the first."""
        if attempt:
            tags = {"attempt": attempt, "num_processes": ranks}
            self._call(f"record attempt {attempt}", lambda: self._set_tags(**tags))

    def failed(self, attempt: int, error: Exception) -> None:
        """Record the error of an attempt, with the rank that caused it and its traceback."""
        causes = list(map(str, getattr(error, "rank_failures", {}).values()))[:1]
        text = "\n".join([_summary_of(error), *causes])
        tag = {f"error_of_attempt_{attempt}": self._tag_of(text)}
        self._call(f"record the error of attempt {attempt}", lambda: self._set_tags(**tag))

    def _tag_of(self, text: str) -> str:
        return printable(self._redaction.of_text(text))[:MAX_TAG]

    def printed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Keep the end of what a rank prints, for a run that fails."""
        if rank < MAX_RANKS_WITH_OUTPUT:
            output = self._output[rank]
            output += data
            del output[:-MAX_OUTPUT]

    def progressed(self, rank: int, progress: Progress) -> None:
        """Record a rank's metrics."""
        if self._records_all:
            self.record(progress, suffix=f"/rank_{rank}")
        elif rank == 0:
            self.record(progress)

    def used(self, usage: Progress) -> None:
        """Record the system metrics of a node."""
        self.record(usage)

    def record(self, progress: Progress, suffix: str = "") -> None:
        """Record metrics. They are sent in the background."""
        timestamp, step = int(progress.at * 1000), int(progress.done)
        metric = self._mlflow.entities.Metric
        self._queue.put(
            metric(INVALID_IN_NAME.sub("_", name) + suffix, value, timestamp, step)
            for name, value in progress.metrics.items()
        )

    def _send(self, metrics: list[Any]) -> None:
        self._client.log_batch(self._run.run_id, metrics=metrics, synchronous=True)

    def _log_page(self, save: Callable[[Path], object]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder, "report.html"))
            self._client.log_artifacts(self._run.run_id, folder, "distributor")

    def _record_error(self, error: BaseException) -> None:
        """Record the error as a tag, and with what the ranks printed before it, as artifacts."""
        self._set_tags(error=self._tag_of(_summary_of(error)))
        with tempfile.TemporaryDirectory() as folder:
            text = "".join(traceback.format_exception(error))
            content = self._redaction.of_text(text).encode(errors="backslashreplace")
            Path(folder, "error.txt").write_bytes(content)
            for rank, output in self._output.items():
                Path(folder, f"rank_{rank}.txt").write_bytes(output)
            self._client.log_artifacts(self._run.run_id, folder, "distributor")


class MetricsQueue:
    """Sends metrics in batches, on a thread of its own, and keeps them while the server fails.

    The first error of `send` is shown as a warning. The metrics are sent again if the server caused
    the error, and dropped if they did.
    """

    def __init__(self, send: Callable[[list[Any]], object]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._pending: deque[Any] = deque()
        self._sent = self._lost = 0
        self._warned = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, metrics: Iterable[Any]) -> None:
        """Queue metrics, to be sent soon."""
        with self._lock:
            self._pending.extend(metrics)
            while len(self._pending) > MAX_PENDING:
                self._pending.popleft()
                self._lost += 1
        if self._thread is None and self._pending:
            self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
            self._thread.start()

    def close(self) -> int:
        """Send the rest as long as the server accepts it, and return how many were lost."""
        self._closing.set()
        if self._thread:
            before = -1
            while self._thread.is_alive() and before < self._sent:
                before = self._sent
                self._thread.join(ANSWER_SECONDS)
        return self._lost + len(self._pending)

    def _run(self) -> None:
        while not self._closing.wait(SEND_INTERVAL):
            self._send_pending()
        self._send_pending()

    def _send_pending(self) -> None:
        """Send all pending metrics, up to the first error."""
        while self._pending:
            with self._lock:
                count = min(MAX_BATCH, len(self._pending))
                batch = [self._pending.popleft() for _ in range(count)]
            try:
                self._send(batch)
                self._sent += len(batch)
            except Exception as error:
                self._handle_error(error, batch)
                return

    def _handle_error(self, error: Exception, batch: list[Any]) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"The MLflow server did not accept metrics: {first_line(error)}. Training "
                "continues."
            )
        # An error without a code is one of the connection.
        if getattr(error, "error_code", SERVER_ERRORS[0]) in SERVER_ERRORS:
            with self._lock:
                self._pending.extendleft(reversed(batch))
        else:
            self._lost += len(batch)


def _summary_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, (RunCancelled, KeyboardInterrupt)) else "FAILED"
