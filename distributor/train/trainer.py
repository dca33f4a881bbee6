"""`TorchTrainer`: Ray Train's class, on Spark or on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

from distributor.control.waiting import Cancellation
from distributor.core.cell_errors import ends_at_caller
from distributor.core.files import absolute
from distributor.core.rank_variables import CheckpointSettings
from distributor.core.spelling import Spelling, checks_keywords, suggestion
from distributor.data.dataframes import DatasetFinder, ShardReference, open_shard
from distributor.errors import RunCancelled
from distributor.rank.context import worker_context
from distributor.rank.messages import Reported
from distributor.run_spec import new_run_id
from distributor.screen.messages import notify, shown_from
from distributor.settings import Listener, check_listeners, instance_of, must_be
from distributor.spark.session import Session
from distributor.spark.spark_job import CallSite
from distributor.torch_distributor import TorchDistributor
from distributor.train.config import (
    DataConfig,
    InvalidArgument,
    RunConfig,
    ScalingConfig,
    TorchConfig,
    TrainRunContext,
    UnsupportedParameter,
    UserCallback,
    check_instance,
)
from distributor.train.result import Result, training_error
from distributor.train.storage.checkpoint import Checkpoint
from distributor.train.storage.checkpoint_store import Storage, latest_checkpoint, latest_positions
from distributor.train.validation import ValidationConfig, ValidationQueue, validation_distributor
from distributor.train.worker_loop import WorkerLoop

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard

_SPELLING = Spelling(
    "TorchTrainer",
    "num_workers",
    "pass ScalingConfig(local_mode=True)",
    "pass ScalingConfig(use_gpu=False)",
)


@checks_keywords
class TorchTrainer:
    """Runs a training function on several ranks, and resumes from its checkpoints.

    All parameters are checked when the trainer is created. The ranks run on the executors of the
    active Spark session, or on this machine if there is none; ``ScalingConfig(local_mode=...)``
    chooses. With ``ScalingConfig(num_workers=0)`` the function runs in this process, its
    exceptions are raised as they are, and `run_config` has no effect but its name.

    Follows ``ray.train.torch.TorchTrainer``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.torch.TorchTrainer.html

    Parameters
    ----------
    train_loop_per_worker : callable
        The function that each rank runs, inside a process group. It takes `train_loop_config`, or
        nothing. As in Ray Train, one whose parameters all have defaults is called with nothing.
    train_loop_config : mapping of str to object, optional
        The argument of the function, by default an empty dict. Any object that can be pickled is
        passed as it is, for example an ``argparse.Namespace``.
    torch_config : TorchConfig, optional
        The process group; by default gloo for CPUs and NCCL for GPUs.
    scaling_config : ScalingConfig, optional
        The number of ranks, and their machines; by default one rank.
    run_config : RunConfig, optional
        The storage, and the handling of failures; by default ``~/distributor_results``, without
        restarts.
    validation_config : ValidationConfig, optional
        A function that validates checkpoints in the background, if a report requests it.
    resume_from_checkpoint : Checkpoint, optional
        The checkpoint to start from as long as the run has none of its own.
    datasets : mapping of str to DataFrame, optional
        Spark DataFrames, or what ``distributor.data.from_parquet`` returns, by name.
        `get_dataset_shard` returns each rank's part.
    dataset_config : DataConfig, optional
        Which datasets the ranks share; by default all of them.
    metadata
        Not supported, as in Ray Train.

    Attributes
    ----------
    backend_config : TorchConfig
        The `torch_config`.
    data_config : DataConfig
        The `dataset_config`.
    running_in_local_mode : bool
        Whether the function runs in this process, in Ray's words: whether ``num_workers`` is 0.
    train_run_context : TrainRunContext
        The configuration, as callbacks receive it.

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
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        if metadata:
            raise UnsupportedParameter(
                "TorchTrainer: metadata is not supported. Add it to the checkpoints: "
                "Checkpoint.set_metadata."
            )
        if resume_from_checkpoint is not None:
            must_be(
                "a Checkpoint, such as Checkpoint(path)", instance_of(Checkpoint), InvalidArgument
            )("resume_from_checkpoint", resume_from_checkpoint)
            resume_from_checkpoint.check_exists()
        for name, value, kind in (
            ("torch_config", torch_config, TorchConfig),
            ("scaling_config", scaling_config, ScalingConfig),
            ("run_config", run_config, RunConfig),
            ("dataset_config", dataset_config, DataConfig),
            ("validation_config", validation_config, ValidationConfig),
            ("datasets", datasets, Mapping),
        ):
            if value is not None:
                check_instance(name, value, kind)
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.backend_config = torch_config or TorchConfig()
        self.scaling_config = scaling_config or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.validation_config = validation_config
        self.resume_from_checkpoint = resume_from_checkpoint
        self.datasets = dict(datasets or {})
        self.data_config = dataset_config or DataConfig()
        self.running_in_local_mode = self.scaling_config.runs_in_process
        self.train_run_context = TrainRunContext(
            self.run_config,
            train_loop_config,
            self.scaling_config,
            self.backend_config,
            self.data_config,
        )
        self._checked_loop()
        self._datasets()
        if not self.running_in_local_mode:
            self._prepare()  # raises now what would be raised when the training starts

    @ends_at_caller
    def fit(self) -> Result:
        """Run the training; after a failure, restart it from the latest checkpoint if configured.

        A run with the name of an earlier one continues from the latest checkpoint of that one.

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
        PreemptionError
            If a rank or an executor died after a preemption notice, and the run was not to be
            restarted (again).
        ControllerError
            If the run could not start, took longer than its ``timeout``, or a callback failed; the
            cause is that error.
        RunCancelled
            If this process has cancelled the run.
        """
        loop = self._checked_loop()
        with shown_from(self.run_config.logging_config.level):
            if self.running_in_local_mode:
                return self._fit_in_process(loop)
            distributor, storage, validations = self._prepare()
            notify(_describe_place(self.scaling_config, distributor.local_mode))
            with validations:
                try:
                    value = distributor.run(loop, self._datasets())
                except RunCancelled:
                    raise
                except Exception as error:
                    raise training_error(error) from error
            return Result.from_storage(storage, value)

    def _checked_loop(self) -> WorkerLoop:
        """Check the configuration as it is now, and return what each rank runs."""
        self.scaling_config.check()
        self.run_config.check()
        return WorkerLoop(
            func=self.train_loop_per_worker,
            config=self.train_loop_config or {},
            torch_config=self.backend_config,
            filesystem=self.run_config.storage_filesystem,
            resume_from=self.resume_from_checkpoint,
        )

    def _datasets(self) -> dict[str, Any]:
        """Return the datasets with how ranks share them; check them as they are now."""
        return self.data_config.datasets_of(self.datasets)

    def _prepare(self) -> tuple[TorchDistributor, Storage, AbstractContextManager[object]]:
        """Return what a run consists of besides the function; check it all."""
        run, scaling, validation = self.run_config, self.scaling_config, self.validation_config
        local_mode = scaling.local_mode
        if local_mode is None:
            local_mode = Session.active() is None
        settings = self._checkpoint_settings(local_mode)
        storage = _open_storage(run, settings)
        listener = _CallbackListener(
            tuple(run.callbacks), self.train_run_context, storage.filesystem
        )
        distributor = self._distributor(local_mode, settings, listener)
        if validation is None:
            return distributor, storage, nullcontext()
        validation.check()
        single = validation_distributor(validation, run.all_settings(), scaling.gpu_type)
        validations = ValidationQueue(validation, storage, settings, single)
        listeners = (*distributor.listeners, validations)
        return replace(distributor, listeners=listeners), storage, validations

    def _checkpoint_settings(self, local_mode: bool) -> CheckpointSettings:
        run = self.run_config
        with _SPELLING.renames():
            is_shared = (
                not run.uses_default_path or local_mode or Session.require_active().is_one_machine
            )
        if not is_shared:
            raise ValueError(
                "On a cluster of several hosts, RunConfig needs a storage_path that all of them "
                "see: a mounted folder, or an address such as s3://bucket/runs. (Or pass "
                "ScalingConfig(local_mode=True) to run on this machine.)"
            )
        checkpoints, path = run.checkpoint_config, os.fspath(run.storage_path)
        if run.storage_filesystem is None:
            path = absolute(path, "storage_path")  # ranks may have another working directory
        return CheckpointSettings(
            storage_path=path,
            name=run.name,
            num_to_keep=checkpoints.num_to_keep,
            score_attribute=checkpoints.checkpoint_score_attribute,
            score_order=checkpoints.checkpoint_score_order,
            validates=self.validation_config is not None,
        )

    def _distributor(
        self, local_mode: bool, settings: CheckpointSettings, listener: Listener
    ) -> TorchDistributor:
        run, scaling = self.run_config, self.scaling_config
        given = run.all_settings()
        set_elsewhere: dict[str, Any] = {
            "num_processes": scaling.num_workers,
            "local_mode": local_mode,
            "use_gpu": scaling.use_gpu,
            "gpu_type": scaling.gpu_type,
            "max_failures": run.failure_config.max_failures,
            "recovery": run.failure_config.recovery,
            "max_preemption_failures": run.failure_config.max_preemption_failures,
            "name": None,  # in `settings`, with the storage path
            "storage_path": None,
        }
        if misplaced := set_elsewhere.keys() & given.keys():
            raise ValueError(
                f"RunConfig.settings has {sorted(misplaced)}, which other parameters of "
                "TorchTrainer and its configuration determine."
            )
        known = {field.name for field in fields(TorchDistributor)} - set_elsewhere.keys()
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"RunConfig.settings has {unknown}. {suggestion(unknown[0], known)}")
        env = {**given.pop("env"), **settings.to_variable()}
        others = given.pop("listeners", ())
        others = [others] if isinstance(others, Listener) else others
        check_listeners("listeners", others)
        return _Distributor(
            **set_elsewhere,
            env=env,
            listeners=(*others, listener),
            storage_filesystem=run.storage_filesystem,
            resume_from=self.resume_from_checkpoint,
            _resize_interval=scaling.elastic_resize_monitor_interval_s,
            **given,
        )

    def _fit_in_process(self, loop: WorkerLoop) -> Result:
        notify("TorchTrainer runs the training function in this process, because num_workers is 0.")
        with _shards_in_process(self._datasets()) as shards:
            run, value = loop.run_in_process(self.run_config.name, shards)
        return Result(run.metrics, run.checkpoint, error=None, path=None, return_value=value)

    @classmethod
    def restore(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise DeprecationWarning, as in Ray Train: a run of the same name continues."""
        raise DeprecationWarning(
            "TorchTrainer.restore and can_restore are deprecated in Ray Train too. Create the "
            "trainer again, with the same RunConfig.name and storage_path: it continues from the "
            "latest checkpoint."
        )

    can_restore = restore


def prepare_fit(
    trainer: TorchTrainer, config: Mapping[str, Any], name: str
) -> tuple[WorkerLoop, dict[str, Any], TorchDistributor, AbstractContextManager[object]]:
    """Return the parts of a fit: what runs, its datasets, its distributor, and its validations.

    Parameters
    ----------
    trainer : TorchTrainer
        The trainer, which stays as it is.
    config : mapping
        Replaces its ``train_loop_config``.
    name : str
        Replaces the name of its ``run_config``.
    """
    changed = copy(trainer)
    changed.train_loop_config = config
    changed.run_config = replace(trainer.run_config, name=name)
    changed.train_run_context = replace(
        trainer.train_run_context, run_config=changed.run_config, train_loop_config=config
    )
    distributor, _, validations = changed._prepare()
    return changed._checked_loop(), changed._datasets(), distributor, validations


@dataclass(frozen=True, repr=False)
class _Distributor(TorchDistributor):
    """Names in messages what the user of `TorchTrainer` wrote."""

    spelling = _SPELLING

    storage_filesystem: Any = None
    resume_from: Checkpoint | None = None
    _resize_interval: float = 0.0

    def _latest_checkpoint(self, settings: CheckpointSettings) -> str | None:
        return latest_checkpoint(settings, self.storage_filesystem)

    def _stored_positions(self, settings: CheckpointSettings) -> Mapping[str, Any]:
        return latest_positions(settings, self.storage_filesystem, self.resume_from)


def _describe_place(scaling: ScalingConfig, local_mode: bool) -> str:
    place = "on this machine" if local_mode else "on executors of the active Spark session"
    if scaling.local_mode is not None:
        reason = f"as ScalingConfig(local_mode={local_mode}) says"
    elif local_mode:
        reason = "because there is no active Spark session"
    else:
        reason = "because there is one; ScalingConfig(local_mode=True) runs them on this machine"
    return f"TorchTrainer runs its ranks {place}, {reason}."


def _open_storage(run: RunConfig, settings: CheckpointSettings) -> Storage:
    """Return the storage of a run; raises now, not after the training, if it is unreadable."""
    storage = Storage(settings.storage_path, settings.name, run.storage_filesystem)
    try:
        storage.folders()
    except Exception as error:
        if run.storage_filesystem is None or not run.uses_default_path:
            raise
        raise ValueError(
            f"RunConfig has a storage_filesystem, but no storage_path, and {settings.storage_path} "
            f"cannot be read in it: {error}. Pass a path in it, such as storage_path='bucket/runs'."
        ) from error
    return storage


@dataclass(eq=False)
class _CallbackListener(Listener):
    """Passes a run's reports and failures to the user's callbacks."""

    callbacks: Sequence[UserCallback]
    context: TrainRunContext
    filesystem: Any

    def reported(self, report: Reported) -> None:
        path = report.checkpoint
        checkpoint = None if path is None else Checkpoint(path, self.filesystem)
        for callback in self.callbacks:
            callback.after_report(
                run_context=self.context,
                metrics=[dict(metrics) for metrics in report.metrics],
                checkpoint=checkpoint,
            )

    def failed(self, attempt: int, error: Exception) -> None:
        failures = getattr(error, "rank_failures", {})
        exceptions = {rank: failure.exception() for rank, failure in failures.items()}
        for callback in self.callbacks:
            callback.after_exception(
                run_context=self.context, worker_exceptions=exceptions or {0: error}
            )


@contextlib.contextmanager
def _shards_in_process(datasets: Mapping[str, Any]) -> Iterator[Mapping[str, DatasetShard]]:
    """Open datasets in this process, whose rows it keeps for the duration of the context."""
    finder = DatasetFinder()
    (found,), _ = finder.replace_in((dict(datasets),), {})
    if not finder.datasets:
        yield datasets
        return
    from distributor.launchers.spark.datasets import Datasets

    opened = Datasets(finder.datasets)
    call_site = CallSite.of_caller("TorchTrainer")
    context = worker_context()
    with opened.opened(new_run_id(), call_site, None, Cancellation()):
        opened.check(1)
        context.data = opened.file().fileno()
        try:
            yield {
                name: open_shard(value.number) if isinstance(value, ShardReference) else value
                for name, value in found.items()
            }
        finally:
            context.data = None
