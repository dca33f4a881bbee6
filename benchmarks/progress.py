"""Cost of logging metrics to MLflow in a training loop, and whether all of them arrive."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import functions
from benchmarks.floors import free_port
from benchmarks.launchers import ours
from benchmarks.measure import Driven, apart
from benchmarks.peers import Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import LOCAL
from benchmarks.turns import Effort, measured
from distributor.core.extras import DISTRIBUTION

WAYS = (
    Peer("ours", "runtime.progress", ours, DISTRIBUTION),
    Peer("mlflow", "mlflow.log_metric", ours, "mlflow"),
    Peer("mlflow_async", "mlflow.log_metric(synchronous=False)", ours, "mlflow"),
)
STEPS, FEW_STEPS = 1000, 200
LOOPS = 3
LEFT = "speed that is left"
UP_SECONDS, DEADLINE = 120.0, 600.0


class Case(NamedTuple):
    """A way to log, and a number of steps."""

    peer: Peer
    steps: int

    @property
    def title(self) -> str:
        return titled(self.steps)


def titled(steps: int) -> str:
    """Return the title of a case."""
    return f"a loop of {steps:,} steps of some 5 ms, a metric each, one rank"


def measure(effort: Effort) -> list[Row]:
    """Measure logging."""
    steps = FEW_STEPS if effort.quick else STEPS
    wanted = [way for way in WAYS if not effort.families or way.family in effort.families]
    return measured([Case(way, steps) for way in wanted], effort.few_rounds, _drive, _rows)


def drive(way: str, steps: int) -> dict[str, Any]:
    """Measure a rank's loop, alternately without and with logging; count what arrived."""
    silent, logging = [], []
    with _server() as uri:
        os.environ["MLFLOW_TRACKING_URI"] = uri
        with ours(LOCAL, 1) as run:
            run(functions.logging_loop, steps // 10, way)
            for _ in range(LOOPS):
                silent.append(run(functions.logging_loop, steps, ""))
                logging.append(run(functions.logging_loop, steps, way))
        arrived = _arrived()
    share = [100 * b / a for a, b in zip(silent, logging, strict=True)]
    lost = LOOPS * steps + steps // 10 - arrived
    return {"silent": silent, "logging": logging, "share": share, "lost": lost}


def _arrived() -> int:
    import mlflow

    client = mlflow.MlflowClient()
    runs = client.search_runs(
        [experiment.experiment_id for experiment in client.search_experiments()]
    )
    return sum(len(client.get_metric_history(run.info.run_id, "loss")) for run in runs)


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """Start an MLflow server on SQLite in the working directory."""
    uri = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
    command += ["--port", uri.rpartition(":")[2], "--backend-store-uri", "sqlite:///mlflow.db"]
    with Path("server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + UP_SECONDS
        while not _answers(uri):
            if time.monotonic() > deadline:
                raise TimeoutError(Path("server.log").read_text()[-2000:])
            time.sleep(0.1)
        yield uri
    finally:
        server.terminate()
        server.wait()


def _answers(uri: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
        return True
    return False


def _drive(case: Case) -> Driven:
    return apart(drive, DEADLINE, way=case.peer.name, steps=case.steps)


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    lost = [one.facts["lost"] for one in measurements]
    return [
        row(case.peer, case.title, "without logging", gathered(measurements, "silent"), "steps/s"),
        row(case.peer, case.title, "logging", gathered(measurements, "logging"), "steps/s"),
        row(case.peer, case.title, LEFT, gathered(measurements, "share"), "%"),
        row(case.peer, case.title, "lost", lost, "metrics"),
    ]
