"""Calls the user's callbacks on the driver while a training run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributor.core.telemetry import Reported
from distributor.launch.run_listener import Listener
from distributor.train.checkpoint import Checkpoint
from distributor.train.config import TrainRunContext, UserCallback


class CallbackListener(Listener):
    """Calls what the user has given.

    Parameters
    ----------
    callbacks : sequence of UserCallback
        What the user has given.
    context : TrainRunContext
        Which training it is.
    filesystem : pyarrow.fs.FileSystem
        Where its checkpoints are.
    """

    def __init__(
        self, callbacks: Sequence[UserCallback], context: TrainRunContext, filesystem: Any
    ) -> None:
        self._callbacks = callbacks
        self._context = context
        self._filesystem = filesystem

    def reported(self, report: Reported) -> None:
        """Hear what all ranks have reported."""
        path = report.checkpoint
        checkpoint = None if path is None else Checkpoint(path, self._filesystem)
        for callback in self._callbacks:
            callback.after_report(self._context, [dict(m) for m in report.metrics], checkpoint)

    def failed(self, attempt: int, error: Exception) -> None:
        """Hear that an attempt failed."""
        failures = getattr(error, "rank_failures", {})
        raised = {rank: failure.exception() for rank, failure in failures.items()} or {0: error}
        for callback in self._callbacks:
            callback.after_exception(self._context, raised)
