"""An MLflow server on SQL."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from support.waiting import comes_true

STARTS_IN = 120.0
LEAN = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Variables without which it talks to its makers, and starts processes for jobs that none has."""


def free_port() -> int:
    """Find a port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def tracking_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """Start a server; give its address. It chooses no port itself, so one is tried."""
    uri = f"http://127.0.0.1:{port or free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    command += ["--host", "127.0.0.1", "--port", uri.rpartition(":")[2]]

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
            return True
        return False

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **LEAN},
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    try:
        assert comes_true(answers, STARTS_IN), (folder / "log").read_text()
        yield uri
    finally:
        os.killpg(process.pid, 9)
        process.wait()
