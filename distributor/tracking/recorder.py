"""Records in a job's MLflow run what ranks measure, and how the job ended."""

from __future__ import annotations

import re
import tempfile
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from distributor.core.redaction import Redaction
from distributor.core.telemetry import Progress
from distributor.core.text import counted
from distributor.errors import RunCancelled
from distributor.launch.console import notify, warn
from distributor.launch.job import Listener
from distributor.node.worker.mlflow_hooks import SERVERS_FAULTS
from distributor.tracking.run import ANSWER_SECONDS, Tracking, bounded, brief
from distributor.wire.messages import Stream

MAX_TAG = 4000
MOST_OF_OUTPUT = 64 * 1024
"""Bytes of what a rank printed last that are kept for a run that fails."""
MOST_RANKS = 64
"""Ranks whose output is."""
MOST_METRICS = 1000
"""Metrics that a server takes at once."""
SEND_EVERY = 1.0
"""Seconds between two batches."""
MOST_WAITING = 500_000
"""Metrics that wait for a server that does not take them; then the oldest are lost."""
NO_KEY = re.compile(r"[^\w\-./: ]")
"""What a metric's name cannot have."""


class Recorder(Listener):
    """Tells a job's MLflow run of it, and ends the run with the job; a context manager.

    Parameters
    ----------
    tracking : Tracking
        The run.
    ranks : "first" or "all"
        Whose metrics it gets. Of all ranks, each has a name of its own: ``loss/rank_3``.
    redaction : Redaction
        Keeps secrets out of it.
    """

    def __init__(self, tracking: Tracking, ranks: str, redaction: Redaction) -> None:
        self._tracking = tracking
        self._all = ranks == "all"
        self._redaction = redaction
        self._mlflow: Any = import_module("mlflow")
        self._client = self._mlflow.MlflowClient(tracking.uri)
        self._outbox = Outbox(self._send)
        self._printed: defaultdict[int, bytearray] = defaultdict(bytearray)

    def __enter__(self) -> None:
        notify(f"MLflow run: {self._tracking.link}")

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if lost := self._outbox.close():
            values = f"{counted(lost, 'value')} of metrics"
            warn(f"{values} did not reach the MLflow run {self._tracking.run_id}.")
        status = _status(error)
        try:
            bounded(lambda: self._end(status, error))
        except Exception as problem:
            run = self._tracking.run_id
            warn(f"The MLflow run {run} could not be ended as {status}: {brief(problem)}")

    def begins(self, attempt: int, ranks: int) -> None:
        """Hear that an attempt begins; the first is recorded as the run is made."""
        if not attempt:
            return
        tags = {"attempt": attempt, "num_processes": ranks}
        try:
            bounded(lambda: self._tag(tags))
        except Exception as problem:
            warn(f"The MLflow run {self._tracking.run_id} is not told of it: {brief(problem)}")

    def printed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Hear what a rank printed."""
        if rank < MOST_RANKS:
            kept = self._printed[rank]
            kept += data
            del kept[:-MOST_OF_OUTPUT]

    def progressed(self, rank: int, progress: Progress) -> None:
        """Hear how far a rank is."""
        if self._all:
            self._record(progress, suffix=f"/rank_{rank}")
        elif rank == 0:
            self._record(progress)

    def used(self, usage: Progress) -> None:
        """Hear what a node's processors, memory and GPUs do."""
        self._record(usage)

    def _record(self, progress: Progress, suffix: str = "") -> None:
        moment, step = int(progress.at * 1000), int(progress.done)
        self._outbox.put(
            self._mlflow.entities.Metric(NO_KEY.sub("_", name) + suffix, value, moment, step)
            for name, value in progress.metrics.items()
        )

    def _send(self, metrics: list[Any]) -> None:
        self._client.log_batch(self._tracking.run_id, metrics=metrics, synchronous=True)

    def _tag(self, tags: dict[str, int]) -> None:
        for name, value in tags.items():
            self._client.set_tag(self._tracking.run_id, f"distributor.{name}", value)

    def _end(self, status: str, error: BaseException | None) -> None:
        run = self._tracking.run_id
        if error is not None:
            summary = self._redaction.of_text(f"{type(error).__name__}: {error}")
            self._client.set_tag(run, "distributor.error", summary[:MAX_TAG])
            self._keep_words(error)
        if self._tracking.made_for_job:
            self._client.set_terminated(run, status)

    def _keep_words(self, error: BaseException) -> None:
        """Keep the error, and what the ranks printed before it."""
        with tempfile.TemporaryDirectory() as folder:
            text = "".join(traceback.format_exception(error))
            Path(folder, "error.txt").write_text(self._redaction.of_text(text))
            for rank, printed in self._printed.items():
                Path(folder, f"rank_{rank}.txt").write_bytes(printed)
            self._client.log_artifacts(self._tracking.run_id, folder, "distributor")


class Outbox:
    """Sends metrics in batches, on a thread of its own.

    Parameters
    ----------
    send : callable
        Sends some. What it raises is said once, and they are sent again, unless they are to blame.
    """

    def __init__(self, send: Callable[[list[Any]], object]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._waiting: deque[Any] = deque()
        self._sent = self._lost = 0
        self._told = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, metrics: Any) -> None:
        """Have metrics sent soon."""
        with self._lock:
            self._waiting.extend(metrics)
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self._lost += 1
        if self._thread is None and self._waiting:
            self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
            self._thread.start()

    def close(self) -> int:
        """Send the rest, for as long as the server takes it; give how many were lost."""
        self._closing.set()
        if self._thread:
            before = -1
            while self._thread.is_alive() and before < self._sent:
                before = self._sent
                self._thread.join(ANSWER_SECONDS)
        return self._lost + len(self._waiting)

    def _serve(self) -> None:
        while not self._closing.wait(SEND_EVERY):
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send all that waits, up to the first trouble."""
        while self._waiting:
            with self._lock:
                count = min(MOST_METRICS, len(self._waiting))
                batch = [self._waiting.popleft() for _ in range(count)]
            try:
                self._send(batch)
                self._sent += len(batch)
            except Exception as error:
                self._note(error, batch)
                return

    def _note(self, error: Exception, batch: list[Any]) -> None:
        if not self._told:
            self._told = True
            warn(f"MLflow's server did not take metrics: {brief(error)}. Training goes on.")
        if getattr(error, "error_code", SERVERS_FAULTS[0]) in SERVERS_FAULTS:
            with self._lock:
                self._waiting.extendleft(reversed(batch))
        else:
            self._lost += len(batch)


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, (RunCancelled, KeyboardInterrupt)) else "FAILED"
