"""Configuration of a training run as a whole, and its callbacks, under Ray Train's names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from distributor.train.checkpoint import Checkpoint
from distributor.train.config import (
    CheckpointConfig,
    ChecksUnsupported,
    FailureConfig,
    ScalingConfig,
)


@dataclass(frozen=True)
class RunConfig(ChecksUnsupported):
    """The storage of a training run, and its handling of failures.

    Follows ``ray.train.RunConfig``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.RunConfig.html

    Parameters
    ----------
    name : str, optional
        The run's name, which is its folder in `storage_path`; by default a new one. A run with the
        name of an earlier run resumes from its latest checkpoint.
    storage_path : str or path, optional
        A folder that all nodes mount, or an address such as ``s3://bucket/runs``; by default
        ``~/distributor_results`` if all ranks are on this machine.
    storage_filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        The file system of `storage_path`; by default the one that the path names.
    failure_config : FailureConfig, optional
        How often the run is restarted; by default never.
    checkpoint_config : CheckpointConfig, optional
        Which checkpoints are kept; by default all.
    settings : mapping of str to object, optional
        Further parameters of `TorchDistributor`: timeout, log_dir, env, environment and so on.
    callbacks : UserCallback or sequence of UserCallback, optional
        Objects that are called on the driver after each report and each failed attempt.
    worker_runtime_env, stop, verbose, progress_reporter, sync_config, log_to_file
        Not supported; any value raises ValueError.

    Raises
    ------
    TypeError
        If `failure_config`, `checkpoint_config` or a callback is of another class.
    ValueError
        If a parameter is not supported.

    Examples
    --------
    >>> run_config = RunConfig(name="mnist", storage_path="s3://bucket/runs")
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[UserCallback] | None = None
    worker_runtime_env: Any = None
    stop: Any = None
    verbose: Any = None
    progress_reporter: Any = None
    sync_config: Any = None
    log_to_file: Any = None

    unsupported: ClassVar[Mapping[str, str]] = {
        "worker_runtime_env": "Pass settings={'env': ..., 'environment': ...}.",
        "stop": "Return from the training function.",
        "verbose": "Pass settings={'show_output': ...}.",
        "progress_reporter": "Call distributor.runtime.progress in the training function.",
        "sync_config": "Each report uploads its checkpoint to storage.",
        "log_to_file": "Pass settings={'log_dir': ...}.",
    }

    def __post_init__(self) -> None:
        self._check_unsupported()
        kinds = {"failure_config": FailureConfig, "checkpoint_config": CheckpointConfig}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, kind())
            elif not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, but is {value!r}.")
        if isinstance(self.callbacks, UserCallback):
            object.__setattr__(self, "callbacks", [self.callbacks])
        callbacks = self.callbacks or ()
        if not isinstance(callbacks, Sequence) or not all(
            isinstance(callback, UserCallback) for callback in callbacks
        ):
            raise TypeError(f"callbacks must be UserCallback objects, but are {callbacks!r}.")


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
