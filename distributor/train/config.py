"""Configuration of a training run, in Ray Train's names.

What the user gives is checked when it is built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from distributor.launch.setting_checks import check_max_failures, check_num_processes
from distributor.train.checkpoint import Checkpoint


class _Refusing:
    """Refuses by name what means something in Ray alone."""

    refused: ClassVar[Mapping[str, str]] = {}

    def _refuse(self) -> None:
        for name, instead in self.refused.items():
            if (value := getattr(self, name)) not in (None, False):
                raise ValueError(
                    f"{type(self).__name__}: {name} is {value!r}, which means nothing on Spark. "
                    f"{instead}"
                )


SLOTS = "What a task has is set for the cluster: spark.task.cpus, spark.task.resource.gpu.amount."


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(_Refusing):
    """How many ranks there are, and where.

    Parameters
    ----------
    num_workers : int or (int, int)
        How many ranks; a pair is (minimum, maximum).
    use_gpu : bool
        Whether each has a GPU.
    accelerator_type : str, optional
        What the GPUs have to be, such as "H100".
    local_mode : bool
        True: on this machine. False: on the executors of the active Spark session.
    resources_per_worker, placement_strategy, trainer_resources, use_tpu, topology, \
bundle_label_selector
        Refused: they mean nothing on Spark.

    Raises
    ------
    TypeError, ValueError
        For what makes no sense, here or at all.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    accelerator_type: str | None = None
    local_mode: bool = True
    resources_per_worker: Any = None
    placement_strategy: Any = None
    trainer_resources: Any = None
    use_tpu: Any = None
    topology: Any = None
    bundle_label_selector: Any = None

    refused: ClassVar[Mapping[str, str]] = {
        "resources_per_worker": SLOTS,
        "placement_strategy": "Spark places tasks.",
        "trainer_resources": "The driver is this process.",
        "use_tpu": "Ranks have GPUs or none.",
        "topology": "Ranks have GPUs or none.",
        "bundle_label_selector": "Spark places tasks.",
    }

    def __post_init__(self) -> None:
        self._refuse()
        check_num_processes(self.num_workers)


@dataclass(frozen=True)
class FailureConfig(_Refusing):
    """How often a training is begun again.

    Parameters
    ----------
    max_failures : int
        How many attempts may fail; -1 for any number.
    controller_failure_limit, fail_fast
        Refused: they mean nothing on Spark.
    """

    max_failures: int = 0
    controller_failure_limit: Any = None
    fail_fast: Any = None

    refused: ClassVar[Mapping[str, str]] = {
        "controller_failure_limit": "The driver is this process.",
        "fail_fast": "Give max_failures=0.",
    }

    def __post_init__(self) -> None:
        self._refuse()
        check_max_failures("max_failures", self.max_failures)


@dataclass(frozen=True)
class CheckpointConfig(_Refusing):
    """Which checkpoints are kept: the latest, and the best.

    Parameters
    ----------
    num_to_keep : int, optional
        How many of the best; by default all.
    checkpoint_score_attribute : str, optional
        The metric that tells how good one is; by default the latest are the best. One that has a
        name of its own may lack it, and is then the worst.
    checkpoint_score_order : "max" or "min"
        Which end of it is better.
    checkpoint_frequency, checkpoint_at_end
        Refused: the training function reports checkpoints when it likes.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    checkpoint_frequency: Any = None
    checkpoint_at_end: Any = None

    refused: ClassVar[Mapping[str, str]] = {
        "checkpoint_frequency": "The training function reports checkpoints when it likes.",
        "checkpoint_at_end": "The training function reports checkpoints when it likes.",
    }

    def __post_init__(self) -> None:
        self._refuse()
        count = self.num_to_keep
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"num_to_keep is a number of checkpoints, but is {count!r}.")
        if count is not None and count < 1:
            raise ValueError(
                f"num_to_keep is {count}, but the latest checkpoint is always kept: give 1 or "
                "more, or None for all."
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ValueError(
                f"checkpoint_score_order is 'max' or 'min', but is {self.checkpoint_score_order!r}."
            )


@dataclass(frozen=True)
class RunConfig(_Refusing):
    """Where a training keeps what, and how it goes on after failures.

    Parameters
    ----------
    name : str, optional
        The training's folder in `storage_path`. A name that is used again goes on from the latest
        checkpoint there; by default it is new each time.
    storage_path : str or path, optional
        A path that all nodes see, or an address such as ``s3://bucket/runs``; by default
        ``~/distributor_results`` where all ranks run on this machine.
    storage_filesystem : pyarrow.fs.FileSystem or fsspec file system, optional
        Where `storage_path` is; by default the path says so.
    failure_config : FailureConfig, optional
        How often it is begun again; by default never.
    checkpoint_config : CheckpointConfig, optional
        Which checkpoints are kept; by default all.
    settings : mapping of str to object
        What else `TorchDistributor` takes: timeout, log_dir, env, environment and so on.
    callbacks : sequence of UserCallback, optional
        What is called in this process after each report and each failed attempt.
    worker_runtime_env, stop, verbose, progress_reporter, sync_config, log_to_file
        Refused: they mean nothing here.
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

    refused: ClassVar[Mapping[str, str]] = {
        "worker_runtime_env": "Give settings={'env': ..., 'environment': ...}.",
        "stop": "The training function stops when it likes.",
        "verbose": "Give settings={'show_output': ...}.",
        "progress_reporter": "Call distributor.runtime.progress in the training function.",
        "sync_config": "Reports bring checkpoints to storage.",
        "log_to_file": "Give settings={'log_dir': ...}.",
    }

    def __post_init__(self) -> None:
        self._refuse()
        kinds = {"failure_config": FailureConfig, "checkpoint_config": CheckpointConfig}
        for name, kind in kinds.items():
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, kind())
            elif not isinstance(given, kind):
                raise TypeError(f"{name} is a {kind.__name__}, but is {given!r}.")
        callbacks = self.callbacks or ()
        if not all(isinstance(callback, UserCallback) for callback in callbacks):
            raise TypeError(f"callbacks are objects of class UserCallback, but are {callbacks!r}.")


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
            By rank, the cause first. Where no rank told of a failure of its own, as when a node
            was lost or a deadline passed, rank 0 stands for all.
        """
