"""Callbacks of the user, which are called on the driver during a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributor.core.telemetry import Reported
from distributor.launch.run_listener import Listener
from distributor.train.checkpoint import Checkpoint

if TYPE_CHECKING:
    from distributor.train.config import RunConfig, ScalingConfig


@dataclass(frozen=True, kw_only=True)
class TrainRunContext:
    """The configuration of a training run, for callbacks.

    Follows ``ray.train.v2.api.context.TrainRunContext``, the first argument of the methods of
    ``ray.train.UserCallback``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.UserCallback.html

    Parameters
    ----------
    run_config : RunConfig
        The one that was passed to `TorchTrainer`.
    scaling_config : ScalingConfig
        The one that was passed to `TorchTrainer`.
    train_loop_config : mapping of str to object, default {}
        The one that was passed to `TorchTrainer`.

    Examples
    --------
    >>> class PrintName(UserCallback):
    ...     def after_report(self, run_context, metrics, checkpoint):
    ...         print(run_context.run_config.name)
    """

    run_config: RunConfig
    scaling_config: ScalingConfig
    train_loop_config: Mapping[str, Any] = field(default_factory=dict)

    def get_run_config(self) -> RunConfig:
        """Return ``run_config``."""
        return self.run_config


class UserCallback:
    """A base class for callbacks on the driver; its methods do nothing.

    The methods are called one at a time, on the thread that waits for the run, while the ranks
    continue. If one raises an exception, the run ends, and the exception is raised.

    Follows ``ray.train.UserCallback``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.UserCallback.html

    Examples
    --------
    >>> class PrintLoss(UserCallback):
    ...     def after_report(self, run_context, metrics, checkpoint):
    ...         print([each["loss"] for each in metrics])
    >>> run_config = RunConfig(callbacks=[PrintLoss()])
    """

    def after_report(
        self,
        run_context: TrainRunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Handle a report of all ranks.

        Parameters
        ----------
        run_context : TrainRunContext
            The configuration of the run.
        metrics : list of dict of str to object
            The metrics of each rank, in rank order.
        checkpoint : Checkpoint or None
            The checkpoint, which now exists; None if none was reported.
        """

    def after_exception(
        self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Handle the failure of an attempt; another attempt may follow.

        Parameters
        ----------
        run_context : TrainRunContext
            The configuration of the run.
        worker_exceptions : dict of int to Exception
            The exceptions by rank, the root cause first. If no rank failed itself, for example
            because a node was lost or a deadline passed, the exception is under rank 0.
        """


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
            callback.after_report(self._context, [dict(m) for m in report.metrics], checkpoint)

    def failed(self, attempt: int, error: Exception) -> None:
        """Handle the failure of an attempt."""
        failures = getattr(error, "rank_failures", {})
        exceptions = {rank: failure.exception() for rank, failure in failures.items()}
        for callback in self._callbacks:
            callback.after_exception(self._context, exceptions or {0: error})
