"""Records in a job's MLflow run what its ranks measure, and how the job ended."""

from __future__ import annotations

import re
import tempfile
import traceback
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

from distributor._compat.mlflow import client_that_prints_no_link
from distributor.core.redaction import Redaction
from distributor.core.text import counted, printable
from distributor.errors import RunCancelled
from distributor.launch.output.labels import RunLabel
from distributor.launch.output.messages import notify, warn
from distributor.launch.run_listener import Listener
from distributor.rank.messages import Progress
from distributor.tracking.metrics_queue import MetricsQueue
from distributor.tracking.run import TrackedRun, call_with_deadline, first_line
from distributor.wire.messages import Stream

MAX_TAG = 4000
"""Characters of an error that a tag holds."""
MAX_OUTPUT = 64 * 1024
"""Bytes of each rank's latest output that are recorded if a run fails."""
MAX_RANKS_WITH_OUTPUT = 64
"""Number of ranks, from rank 0 on, whose output is recorded."""
INVALID_IN_NAME = re.compile(r"[^\w\-./: ]")
"""Characters that a metric's name cannot have."""


class Recorder(Listener):
    """Records a job in its MLflow run, and ends the run with the job; a context manager.

    Parameters
    ----------
    run : TrackedRun
        The run.
    ranks : "first" or "all"
        The ranks whose metrics are recorded. With "all", each metric has its rank in its name:
        ``loss/rank_3``.
    redaction : Redaction
        Keeps secrets out of what is recorded.
    label : RunLabel
        Marks the job's messages while other runs are active.
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

    def __enter__(self) -> None:
        notify(self._label.message(f"MLflow run: {self._run.link}"))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        run_id = self._run.run_id
        if lost := self._queue.close():
            values = f"{counted(lost, 'value')} of metrics"
            warn(f"{values} did not reach the MLflow run {run_id}.")
        status = _status(error)
        try:
            call_with_deadline(lambda: self._end(status, error))
        except Exception as problem:
            warn(f"The MLflow run {run_id} could not be ended as {status}: {first_line(problem)}")

    def begins(self, attempt: int, ranks: int) -> None:
        """Record the number of a further attempt; the run is created with that of the first."""
        if not attempt:
            return
        tags = {"attempt": attempt, "num_processes": ranks}
        try:
            call_with_deadline(lambda: self._set_tags(tags))
        except Exception as problem:
            warn(
                f"Attempt {attempt} could not be recorded in the MLflow run {self._run.run_id}: "
                f"{first_line(problem)}"
            )

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

    def _set_tags(self, tags: dict[str, int]) -> None:
        for name, value in tags.items():
            self._client.set_tag(self._run.run_id, f"distributor.{name}", value)

    def _end(self, status: str, error: BaseException | None) -> None:
        run_id = self._run.run_id
        if error is not None:
            summary = printable(self._redaction.of_text(f"{type(error).__name__}: {error}"))
            self._client.set_tag(run_id, "distributor.error", summary[:MAX_TAG])
            self._log_error_and_output(error)
        if self._run.created_for_job:
            self._client.set_terminated(run_id, status)

    def _log_error_and_output(self, error: BaseException) -> None:
        """Log the error, and what the ranks printed before it, as artifacts."""
        with tempfile.TemporaryDirectory() as folder:
            text = "".join(traceback.format_exception(error))
            content = self._redaction.of_text(text).encode(errors="backslashreplace")
            Path(folder, "error.txt").write_bytes(content)
            for rank, output in self._output.items():
                Path(folder, f"rank_{rank}.txt").write_bytes(output)
            self._client.log_artifacts(self._run.run_id, folder, "distributor")


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, (RunCancelled, KeyboardInterrupt)) else "FAILED"
