"""`TorchTrainer`: Ray Train's class, on Spark or on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings, absolute
from distributor.core.spelling import Spelling
from distributor.errors import RunCancelled
from distributor.launch.run_listener import Listener
from distributor.launch.spark.session import Session
from distributor.torch_distributor import TorchDistributor
from distributor.train.callbacks import CallbackListener
from distributor.train.checkpoint import Checkpoint
from distributor.train.config import ScalingConfig
from distributor.train.errors import training_error
from distributor.train.result import Result
from distributor.train.run_config import RunConfig, TrainRunContext
from distributor.train.runtime.process_group import TorchConfig
from distributor.train.runtime.worker_loop import WorkerLoop
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.validation.config import ValidationConfig
from distributor.train.validation.process import validation_distributor
from distributor.train.validation.queue import ValidationQueue

_SET_ELSEWHERE = {
    "gpu_type",
    "local_mode",
    "max_failures",
    "name",
    "num_processes",
    "storage_path",
    "use_gpu",
}
"""Parameters of `TorchDistributor` that other parameters than ``RunConfig.settings`` determine."""
_SPELLING = Spelling("TorchTrainer", "num_workers", "pass ScalingConfig(local_mode=True)")
_READ_DATA = "Read the data in train_loop_per_worker, depending on the rank."
_UNSUPPORTED = {
    "datasets": _READ_DATA,
    "dataset_config": _READ_DATA,
    "metadata": "Add it to the checkpoints: Checkpoint.set_metadata.",
}


class _Distributor(TorchDistributor):
    """Names in messages what the user of `TorchTrainer` wrote."""

    spelling = _SPELLING


class TorchTrainer:
    """Runs a training function on several ranks, and resumes from its checkpoints.

    All parameters are checked when the trainer is created.

    Follows ``ray.train.torch.TorchTrainer``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.TorchTrainer.html

    Parameters
    ----------
    train_loop_per_worker : callable
        The function that each rank runs, inside a process group. It takes `train_loop_config`, or
        nothing.
    train_loop_config : mapping of str to object, optional
        The argument of the function; by default empty.
    torch_config : TorchConfig, optional
        The process group; by default gloo for CPUs and NCCL for GPUs.
    scaling_config : ScalingConfig, optional
        The number of ranks, and their machines; by default one rank on this machine.
    run_config : RunConfig, optional
        The storage, and the handling of failures; by default ``~/distributor_results``, without
        restarts.
    validation_config : ValidationConfig, optional
        A function that validates checkpoints in the background, if a report requests it.
    resume_from_checkpoint : Checkpoint, optional
        The checkpoint to start from as long as the run has none of its own.
    datasets, dataset_config, metadata
        Not supported; any value but None raises ValueError.

    Raises
    ------
    TypeError
        If a parameter is of another type, or the function takes other arguments.
    ValueError
        If a parameter is not supported, the run's name is not a valid name of a folder,
        ``RunConfig.settings`` has an unknown parameter, ``storage_path`` is missing on a cluster of
        several hosts, or no file system is known for it.
    FileNotFoundError
        If `resume_from_checkpoint` does not exist.
    RuntimeError
        If ``local_mode`` is False and there is no active Spark session.

    Examples
    --------
    >>> def train_func(config):
    ...     from distributor import train
    ...     train.report({"loss": config["lr"]})
    >>> trainer = TorchTrainer(
    ...     train_func,
    ...     train_loop_config={"lr": 0.5},
    ...     scaling_config=ScalingConfig(num_workers=2),
    ... )
    >>> trainer.fit().metrics
    {'loss': 0.5}
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        validation_config: ValidationConfig | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        datasets: Any = None,
        dataset_config: Any = None,
        metadata: Any = None,
    ) -> None:
        unsupported = {
            "datasets": datasets,
            "dataset_config": dataset_config,
            "metadata": metadata,
        }
        for name, value in unsupported.items():
            if value:
                raise ValueError(f"TorchTrainer: {name} is not supported. {_UNSUPPORTED[name]}")
        _check_resume_from(resume_from_checkpoint)
        _check_type("train_loop_config", train_loop_config, Mapping)
        _check_type("torch_config", torch_config, TorchConfig)
        _check_type("scaling_config", scaling_config, ScalingConfig)
        _check_type("run_config", run_config, RunConfig)
        _check_type("validation_config", validation_config, ValidationConfig)
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.torch_config = torch_config or TorchConfig()
        self.scaling_config = scaling_config or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.validation_config = validation_config
        self.resume_from_checkpoint = resume_from_checkpoint
        self._prepare()  # raises now what would otherwise be raised when the training starts

    def _prepare(
        self,
    ) -> tuple[TorchDistributor, WorkerLoop, Storage, AbstractContextManager[object]]:
        """Check the configuration as it is now, and return what a run consists of."""
        scaling, run, validation = self.scaling_config, self.run_config, self.validation_config
        scaling.check()
        run.check()
        loop = WorkerLoop(
            func=self.train_loop_per_worker,
            config=dict(self.train_loop_config or {}),
            torch_config=self.torch_config,
            filesystem=run.storage_filesystem,
            resume_from=self.resume_from_checkpoint,
        )
        settings = _checkpoint_settings(run, scaling)
        settings = replace(settings, validates=validation is not None)
        storage = Storage(settings.storage_path, settings.name, run.storage_filesystem)
        storage.folders()  # raises now, not after the training, if storage is unreadable
        context = TrainRunContext(
            run_config=run, scaling_config=scaling, train_loop_config=loop.config
        )
        listener = CallbackListener(tuple(run.callbacks), context, storage.filesystem)
        distributor = _create_distributor(run, scaling, settings, listener)
        if validation is None:
            return distributor, loop, storage, nullcontext()
        validation.check()
        single = validation_distributor(validation, run.settings, scaling.accelerator_type)
        validations = ValidationQueue(validation, storage, settings, single)
        listeners = (*distributor.listeners, validations)
        return replace(distributor, listeners=listeners), loop, storage, validations

    def fit(self) -> Result:
        """Run the training; after a failure, restart it from the latest checkpoint if configured.

        Returns
        -------
        Result
            The reports, the checkpoints, and the value that rank 0 returned.

        Raises
        ------
        WorkerGroupError
            If ranks failed in the last attempt. Its ``worker_failures`` has their exceptions, and
            its cause is the one that `TorchDistributor.run` raises. `Result.from_path` reads the
            reports and checkpoints up to then.
        ControllerError
            If the run could not start, took longer than its ``timeout``, or a callback failed; the
            cause is that error.
        RunCancelled
            If this process has cancelled the run.
        """
        distributor, loop, storage, validations = self._prepare()
        with validations:
            try:
                value = distributor.run(loop)
            except RunCancelled:
                raise
            except Exception as error:
                raise training_error(error) from error
        return Result.from_path(storage.path, storage.filesystem, return_value=value)


def _check_type(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, but is {value!r}.")


def _check_resume_from(checkpoint: object) -> None:
    if checkpoint is None:
        return
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            "resume_from_checkpoint must be a Checkpoint, such as Checkpoint(path), but is "
            f"{checkpoint!r}."
        )
    checkpoint.check_exists()


def _checkpoint_settings(run: RunConfig, scaling: ScalingConfig) -> CheckpointSettings:
    if run.uses_default_path and not _is_one_machine(scaling):
        raise ValueError(
            "On a cluster of several hosts, RunConfig needs a storage_path that all of them see: a "
            "mounted folder, or an address such as s3://bucket/runs."
        )
    checkpoints, path = run.checkpoint_config, os.fspath(run.storage_path)
    if run.storage_filesystem is None:
        path = absolute(path)  # ranks may have another working directory
    return CheckpointSettings(
        storage_path=path,
        name=run.name,
        num_to_keep=checkpoints.num_to_keep,
        score_attribute=checkpoints.checkpoint_score_attribute,
        score_order=checkpoints.checkpoint_score_order,
    )


def _is_one_machine(scaling: ScalingConfig) -> bool:
    return scaling.local_mode or Session.require_active(_SPELLING.run_here).is_one_machine


def _create_distributor(
    run: RunConfig,
    scaling: ScalingConfig,
    checkpoint_settings: CheckpointSettings,
    listener: Listener,
) -> TorchDistributor:
    settings = dict(run.settings)
    if misplaced := _SET_ELSEWHERE & settings.keys():
        raise ValueError(
            f"RunConfig.settings has {sorted(misplaced)}, which other parameters of TorchTrainer "
            "and its configuration determine."
        )
    known = {field.name for field in fields(TorchDistributor)} - _SET_ELSEWHERE
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"RunConfig.settings has {unknown}; it takes {', '.join(sorted(known))}.")
    env = {**settings.pop("env", {}), **checkpoint_settings.to_variable()}
    others = settings.pop("listeners", ())
    listeners = (*([others] if isinstance(others, Listener) else others), listener)
    return _Distributor(
        scaling.num_workers,
        local_mode=scaling.local_mode,
        use_gpu=scaling.use_gpu,
        gpu_type=scaling.accelerator_type,
        max_failures=run.failure_config.max_failures,
        env=env,
        listeners=listeners,
        **settings,
    )
