"""TorchTrainer: Ray Train's class, on Spark or on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings, absolute, check_name
from distributor.launch.job import new_run_id
from distributor.launch.run_listener import Listener
from distributor.launch.spark.session import Session
from distributor.torch_distributor import TorchDistributor
from distributor.train.callbacks import CallbackListener
from distributor.train.checkpoint import Checkpoint
from distributor.train.config import RunConfig, ScalingConfig, TrainRunContext
from distributor.train.result import Result
from distributor.train.runtime.process_group import TorchConfig
from distributor.train.runtime.worker_loop import Loop
from distributor.train.storage.checkpoint_store import Storage

RESULTS = "~/distributor_results"
"""Where results are kept by default, when all ranks are on this machine."""
OURS = {
    "gpu_type",
    "local_mode",
    "max_failures",
    "name",
    "num_processes",
    "storage_path",
    "use_gpu",
}
"""Settings of the distributor that other options give."""
_DATA = "Read the data in train_loop_per_worker, which knows its rank."
_REFUSED = {
    "datasets": _DATA,
    "dataset_config": _DATA,
    "metadata": "Give it to the checkpoints: Checkpoint.set_metadata.",
}


class TorchTrainer:
    """Runs a training function on several ranks, and goes on from its checkpoints.

    A drop-in for ``ray.train.torch.TorchTrainer``. What it takes is checked where it is built.

    Parameters
    ----------
    train_loop_per_worker : callable
        What each rank runs, inside a process group: of `train_loop_config`, or of nothing.
    train_loop_config : mapping of str to object, optional
        What the function is given.
    torch_config : TorchConfig, optional
        The process group.
    scaling_config : ScalingConfig, optional
        How many ranks, and where; by default one on this machine.
    run_config : RunConfig, optional
        What is kept where, and what follows a failure.
    resume_from_checkpoint : Checkpoint, optional
        Where the training begins, as long as it has no checkpoint of its own.
    datasets, dataset_config, metadata
        Refused: they mean nothing here.

    Raises
    ------
    TypeError, ValueError
        For what makes no sense.
    FileNotFoundError
        Where `resume_from_checkpoint` is gone.
    RuntimeError
        As `TorchDistributor` does.

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
        resume_from_checkpoint: Checkpoint | None = None,
        datasets: Any = None,
        dataset_config: Any = None,
        metadata: Any = None,
    ) -> None:
        refused = {"datasets": datasets, "dataset_config": dataset_config, "metadata": metadata}
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"TorchTrainer: {name} means nothing here. {_REFUSED[name]}")
        if resume_from_checkpoint is not None:
            if not isinstance(resume_from_checkpoint, Checkpoint):
                raise TypeError(
                    "resume_from_checkpoint is a Checkpoint, such as Checkpoint(path), but is "
                    f"{resume_from_checkpoint!r}."
                )
            resume_from_checkpoint.check_there()
        for name, value, kind in (
            ("train_loop_config", train_loop_config, Mapping),
            ("torch_config", torch_config, TorchConfig),
            ("scaling_config", scaling_config, ScalingConfig),
            ("run_config", run_config, RunConfig),
        ):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} is a {kind.__name__}, but is {value!r}.")
        scaling, run = scaling_config or ScalingConfig(), run_config or RunConfig()
        self._loop = Loop(
            func=train_loop_per_worker,
            config=dict(train_loop_config or {}),
            torch_config=torch_config or TorchConfig(),
            filesystem=run.storage_filesystem,
            resume_from=resume_from_checkpoint,
        )
        checkpoint_settings = _keeping_of(run, scaling)
        self._storage = Storage(
            checkpoint_settings.storage_path, checkpoint_settings.name, run.storage_filesystem
        )
        self._storage.next_index()  # what cannot be read is told now, and not after the training
        context = TrainRunContext(
            run_config=run, scaling_config=scaling, train_loop_config=self._loop.config
        )
        called = CallbackListener(tuple(run.callbacks or ()), context, self._storage.filesystem)
        self._distributor = _distributor_of(run, scaling, checkpoint_settings, called)

    def fit(self) -> Result:
        """Train, again from the latest checkpoint where that fails and may.

        Returns
        -------
        Result
            What was reported and kept, and what rank 0 returned.

        Raises
        ------
        Exception
            What `TorchDistributor.run` raises: the failing rank's own, of the last attempt.
            `Result.from_path` reads what was kept until then.
        """
        value = self._distributor.run(self._loop)
        storage = self._storage
        return Result.from_path(storage.path, storage.filesystem, return_value=value)


def _keeping_of(run: RunConfig, scaling: ScalingConfig) -> CheckpointSettings:
    checkpoints = run.checkpoint_config
    path = os.fspath(run.storage_path or _default_path(scaling))
    if run.storage_filesystem is None:
        path = absolute(path)  # ranks may have another working folder
    if run.name is not None:
        check_name("RunConfig.name", run.name)
    return CheckpointSettings(
        storage_path=path,
        name=run.name or new_run_id(),
        num_to_keep=checkpoints.num_to_keep,
        score_attribute=checkpoints.checkpoint_score_attribute,
        score_order=checkpoints.checkpoint_score_order,
    )


def _default_path(scaling: ScalingConfig) -> str:
    session = None if scaling.local_mode else Session.require_active()
    if session is not None and not session.is_one_machine:
        raise ValueError(
            "On a cluster of several hosts RunConfig needs a storage_path that all of them see: a "
            "mounted folder, or an address such as s3://bucket/runs."
        )
    return RESULTS


def _distributor_of(
    run: RunConfig,
    scaling: ScalingConfig,
    checkpoint_settings: CheckpointSettings,
    called: Listener,
) -> TorchDistributor:
    settings = dict(run.settings)
    if ours := OURS & settings.keys():
        raise ValueError(f"RunConfig.settings has {sorted(ours)}, which other options give.")
    known = {field.name for field in fields(TorchDistributor)} - OURS
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"RunConfig.settings has {unknown}; it takes {', '.join(sorted(known))}.")
    env = {**settings.pop("env", {}), **checkpoint_settings.to_variable()}
    listeners = (*settings.pop("listeners", ()), called)
    return TorchDistributor(
        scaling.num_workers,
        local_mode=scaling.local_mode,
        use_gpu=scaling.use_gpu,
        gpu_type=scaling.accelerator_type,
        max_failures=run.failure_config.max_failures,
        env=env,
        listeners=listeners,
        **settings,
    )
