"""`TorchTrainer`: Ray Train's class, on Spark or on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

from distributor.core.spelling import checks_keywords
from distributor.errors import RunCancelled
from distributor.launch.output.messages import notify, shown_from
from distributor.torch_distributor import TorchDistributor
from distributor.train.callbacks import CallbackListener
from distributor.train.checkpoint import Checkpoint
from distributor.train.config import InvalidArgument, UnsupportedParameter
from distributor.train.data_config import DataConfig
from distributor.train.datasets import shards_in_process
from distributor.train.errors import training_error
from distributor.train.result import Result
from distributor.train.run_config import RunConfig, TrainRunContext
from distributor.train.run_plan import (
    Placement,
    checkpoint_settings,
    create_distributor,
    open_storage,
)
from distributor.train.runtime.process_group import TorchConfig
from distributor.train.runtime.worker_loop import WorkerLoop
from distributor.train.scaling_config import ScalingConfig
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.validation.config import ValidationConfig
from distributor.train.validation.process import validation_distributor
from distributor.train.validation.queue import ValidationQueue


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
        nothing. One that takes it or nothing is called with it if it is not empty.
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
        _check_resume_from(resume_from_checkpoint)
        _check_type("torch_config", torch_config, TorchConfig)
        _check_type("scaling_config", scaling_config, ScalingConfig)
        _check_type("run_config", run_config, RunConfig)
        _check_type("dataset_config", dataset_config, DataConfig)
        _check_type("validation_config", validation_config, ValidationConfig)
        _check_type("datasets", datasets, Mapping)
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
            distributor, storage, placement, validations = self._prepare()
            notify(str(placement))
            _announce_continuation(storage, self.run_config.name)
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

    def _prepare(
        self,
    ) -> tuple[TorchDistributor, Storage, Placement, AbstractContextManager[object]]:
        """Return what a run consists of besides the function; check it all."""
        run, scaling, validation = self.run_config, self.scaling_config, self.validation_config
        placement = Placement.of(scaling)
        settings = checkpoint_settings(run, placement, validates=validation is not None)
        storage = open_storage(run, settings)
        listener = CallbackListener(
            tuple(run.callbacks), self.train_run_context, storage.filesystem
        )
        distributor = create_distributor(
            run, scaling, placement, settings, listener, self.resume_from_checkpoint
        )
        if validation is None:
            return distributor, storage, placement, nullcontext()
        validation.check()
        single = validation_distributor(validation, run.all_settings(), scaling.gpu_type)
        validations = ValidationQueue(validation, storage, settings, single)
        listeners = (*distributor.listeners, validations)
        return replace(distributor, listeners=listeners), storage, placement, validations

    def _fit_in_process(self, loop: WorkerLoop) -> Result:
        notify("TorchTrainer runs the training function in this process, because num_workers is 0.")
        with shards_in_process(self._datasets()) as shards:
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

    @classmethod
    def can_restore(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise DeprecationWarning, as `restore` does."""
        cls.restore()


def _announce_continuation(storage: Storage, name: str) -> None:
    """Show that the run continues an earlier one of its name, if it does."""
    if committed := storage.committed():
        notify(
            f"The run {name!r} continues from {committed[-1][0]}, the latest checkpoint in "
            f"{storage.path}. Another RunConfig.name starts anew."
        )


def _check_type(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidArgument(f"{name} must be a {kind.__name__}, but is {value!r}.")


def _check_resume_from(checkpoint: object) -> None:
    if checkpoint is None:
        return
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidArgument(
            "resume_from_checkpoint must be a Checkpoint, such as Checkpoint(path), but is "
            f"{checkpoint!r}."
        )
    checkpoint.check_exists()
