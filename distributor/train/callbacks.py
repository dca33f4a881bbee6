"""Calls the user's callbacks on the driver during a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributor.launch.run_listener import Listener
from distributor.rank.messages import Reported
from distributor.train.checkpoint import Checkpoint
from distributor.train.run_config import TrainRunContext, UserCallback


class CallbackListener(Listener):
    """Passes a run's reports and failures to the user's callbacks.

    Parameters
    ----------
    callbacks : sequence of UserCallback
        The callbacks.
    context : TrainRunContext
        The first argument of their methods.
    filesystem : pyarrow.fs.FileSystem
        The file system of the run's checkpoints.
    """

    def __init__(
        self, callbacks: Sequence[UserCallback], context: TrainRunContext, filesystem: Any
    ) -> None:
        self._callbacks = callbacks
        self._context = context
        self._filesystem = filesystem

    def reported(self, report: Reported) -> None:
        """Handle a report of all ranks."""
        path = report.checkpoint
        checkpoint = None if path is None else Checkpoint(path, self._filesystem)
        for callback in self._callbacks:
            callback.after_report(
                run_context=self._context,
                metrics=[dict(metrics) for metrics in report.metrics],
                checkpoint=checkpoint,
            )

    def failed(self, attempt: int, error: Exception) -> None:
        """Handle the failure of an attempt."""
        failures = getattr(error, "rank_failures", {})
        exceptions = {rank: failure.exception() for rank, failure in failures.items()}
        for callback in self._callbacks:
            callback.after_exception(
                run_context=self._context, worker_exceptions=exceptions or {0: error}
            )
