"""Records in a job's MLflow run what its ranks measure, and how the job ended."""

from __future__ import annotations

import re
import tempfile
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from distributor._compat.mlflow import client_that_prints_no_link
from distributor.core.rank_variables import SERVER_ERRORS
from distributor.core.text import Redaction, counted, first_line, printable
from distributor.errors import RunCancelled
from distributor.rank.messages import Progress
from distributor.screen.messages import RunLabel, notify, warn
from distributor.settings.listener import Listener
from distributor.tracking.run import ANSWER_SECONDS, TrackedRun, call_with_deadline
from distributor.wire.messages import Stream

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
            self._record(progress, suffix=f"/rank_{rank}")
        elif rank == 0:
            self._record(progress)

    def used(self, usage: Progress) -> None:
        """Record the system metrics of a node."""
        self._record(usage)

    def _record(self, progress: Progress, suffix: str = "") -> None:
        timestamp, step = int(progress.at * 1000), int(progress.done)
        metric = self._mlflow.entities.Metric
        self._queue.put(
            metric(INVALID_IN_NAME.sub("_", name) + suffix, value, timestamp, step)
            for name, value in progress.metrics.items()
        )

    def _send(self, metrics: list[Any]) -> None:
        self._client.log_batch(self._run.run_id, metrics=metrics, synchronous=True)

    def _record_error(self, error: BaseException) -> None:
        self._set_tags(error=self._tag_of(_summary_of(error)))
        self._log_error_and_output(error)

    def _log_error_and_output(self, error: BaseException) -> None:
        """Log the error, and what the ranks printed before it, as artifacts."""
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
