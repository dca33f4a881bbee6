"""What the user has called on the driver while a training goes on, in Ray Train's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributor.launch.job import Listener
from distributor.train.checkpoint import Checkpoint
from distributor.wire.progress import Reported

if TYPE_CHECKING:
    from distributor.train.config import RunConfig, ScalingConfig


@dataclass(frozen=True, kw_only=True)
class TrainRunContext:
    """Which training it is.

    Parameters
    ----------
    run_config : RunConfig
        As `TorchTrainer` was given it.
    scaling_config : ScalingConfig
        Likewise.
    train_loop_config : mapping of str to object
        Likewise.
    """

    run_config: RunConfig
    scaling_config: ScalingConfig
    train_loop_config: Mapping[str, Any] = field(default_factory=dict)

    def get_run_config(self) -> RunConfig:
        """Give ``run_config``."""
        return self.run_config


class UserCallback:
    """What is called in the driver's process; a base class, whose methods do nothing.

    Its methods are called one at a time, by the thread that waits for the training, which goes on
    meanwhile. What one of them raises ends the training, and is raised.
    """

    def after_report(
        self,
        run_context: TrainRunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Hear what all ranks have reported.

        Parameters
        ----------
        run_context : TrainRunContext
            Which training it is.
        metrics : list of dict of str to object
            Each rank's, in the order of ranks.
        checkpoint : Checkpoint or None
            The one that exists now, where one was reported.
        """

    def after_exception(
        self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Hear that an attempt failed; perhaps another follows.

        Parameters
        ----------
        run_context : TrainRunContext
            Which training it is.
        worker_exceptions : dict of int to Exception
            By rank, the cause first. Where a node was lost, and no rank told of a failure of its
            own, rank 0 stands for all.
        """


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
