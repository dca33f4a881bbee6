"""Sends metrics to a server in batches, and keeps them while the server fails."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from distributor.core.mlflow_env import SERVER_ERRORS
from distributor.launch.output.messages import warn
from distributor.tracking.run import ANSWER_SECONDS, first_line

MAX_BATCH = 1000
"""Metrics that a server accepts in one request."""
SEND_INTERVAL = 1.0
"""Seconds between two batches."""
MAX_PENDING = 500_000
"""Metrics that wait for a server that does not accept them; beyond it the oldest are dropped."""


class MetricsQueue:
    """Sends metrics in batches, on a thread of its own.

    Parameters
    ----------
    send : callable
        Sends a list of metrics. Its first error is shown as a warning. The metrics are sent again
        if the server caused the error, and dropped if they did.
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
