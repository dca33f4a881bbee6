"""Training with reports, and with checkpoints that a later run resumes from, as in Ray Train.

This package has what users import, under Ray Train's names. A rank's part is in
`distributor.train.runtime`, and checkpoints in storage are in `distributor.train.storage`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from distributor.core.versions import require_arrow

require_arrow("distributor.train")

from distributor import runtime as this_rank  # train.runtime is another one
from distributor.settings import check_bool, instance_of, must_be, optional
from distributor.train.config import (
    BackendConfig,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
    TrainRunContext,
    UserCallback,
)
from distributor.train.result import (
    ControllerError,
    PreemptionError,
    PreemptionInfo,
    Result,
    TrainingFailedError,
    WorkerGroupError,
)
from distributor.train.runtime.report_round import UploadFn
from distributor.train.runtime.session import is_apart, session
from distributor.train.storage.checkpoint import (
    Checkpoint,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
)
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.validation import ValidationConfig, ValidationFn, ValidationTaskConfig
from distributor.unsupported import refuse_modules

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard

__all__ = [
    "TRAIN_DATASET_KEY",
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ControllerError",
    "DataConfig",
    "FailureConfig",
    "LoggingConfig",
    "PreemptionError",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "StorageContext",
    "SyncConfig",
    "TrainContext",
    "TrainRunContext",
    "TrainingFailedError",
    "UserCallback",
    "ValidationConfig",
    "ValidationFn",
    "ValidationTaskConfig",
    "WorkerGroupError",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "is_preempted",
    "report",
]

refuse_modules()

TRAIN_DATASET_KEY = "train"
"""The name of the training data among the datasets of `TorchTrainer`, as in ``ray.train``."""
_NO_TRIAL = (
    "Trials belong to Ray Tune, and are deprecated in Ray Train too: use get_experiment_name() for "
    "the name of the run, and get_storage() for its folder."
)
_NO_METADATA = (
    "get_metadata() is deprecated in Ray Train too: pass the metadata in train_loop_config, or add "
    "it to the checkpoints with Checkpoint.set_metadata."
)
_check_checkpoint = must_be(
    "a Checkpoint, such as Checkpoint.from_directory(folder)",
    instance_of(Checkpoint, type(None)),
    TypeError,
)
_check_validation = must_be(
    "True, False or a ValidationTaskConfig",
    instance_of(bool, ValidationTaskConfig, type(None)),
    TypeError,
)


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | str = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: UploadFn | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Report metrics and, optionally, a checkpoint, together with all other ranks.

    Every rank must call this equally often. A checkpoint consists of the files that all ranks have
    saved, and exists once all of them are in storage. If several ranks have saved into one folder,
    each of them reports that folder, and each of its files is uploaded once. Of different files of
    one name, that of rank 0 is kept.

    Follows ``ray.train.report``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.report.html

    Parameters
    ----------
    metrics : mapping of str to object
        This rank's metrics. They must be JSON-serializable, tensors with one element, or NumPy
        arrays, which become lists. Those of rank 0 are recorded.
    checkpoint : Checkpoint, optional
        What this rank has saved. Ranks that have saved nothing pass None, the default.
    checkpoint_dir_name : str, optional
        The name of the checkpoint's folder; by default ``checkpoint_000000`` and so on. That of the
        first rank that passes one counts.
    checkpoint_upload_mode : CheckpointUploadMode or str, default CheckpointUploadMode.SYNC
        SYNC: the checkpoint exists when this returns. ASYNC: this returns at once, and the files
        are uploaded in the background, in the order of the reports; if eight are not yet uploaded,
        it waits for the first of them. NO_UPLOAD: the checkpoint is already a folder in the run's
        folder in storage, whose name counts, not `checkpoint_dir_name`.
    delete_local_checkpoint_after_upload : bool, optional
        Whether to remove this rank's folder once the checkpoint exists; by default only if the mode
        is ASYNC. If storage is on the same disk, its files are then not copied. A folder in storage
        is never removed.
    checkpoint_upload_fn : callable, optional
        Uploads this rank's checkpoint, on another thread; by default its files are copied. It is
        called with the checkpoint and its name, unless the mode is NO_UPLOAD, and returns the
        uploaded checkpoint, which must be a folder in the run's folder, the same on all ranks:
        ``get_context().get_storage().build_checkpoint_path_from_name(name)``, or another one.
        Ranks that report a checkpoint must either all pass a function, or none.
    validation : bool or ValidationTaskConfig, default False
        Whether the driver validates the checkpoint in the background, with the function of
        ``TorchTrainer(validation_config=...)``; a `ValidationTaskConfig` passes arguments. That of
        the first rank with a checkpoint counts.

    Raises
    ------
    DistributorError
        If a rank could not upload its files, a checkpoint of that name exists, or a rank has
        returned or does not report within 30 minutes. With ASYNC, the next report raises it, or the
        end of the run.
    Exception
        What `checkpoint_upload_fn` raises on this rank; the other ranks raise DistributorError.
    ConnectionError
        If rank 0 has ended.
    RuntimeError
        If this process is not a rank of a run, or the run has no storage.
    TypeError
        If the metrics are no dict or cannot be serialized, or `checkpoint`, `checkpoint_upload_fn`,
        `delete_local_checkpoint_after_upload` or `validation` is of another type.
    ValueError
        If `checkpoint_dir_name` or `checkpoint_upload_mode` is not valid, the checkpoint's folder
        contains the run's, the mode is NO_UPLOAD and the checkpoint is not in the run's folder,
        `checkpoint_upload_fn` returns no checkpoint there, or a validation is requested without a
        checkpoint or without a function.

    Examples
    --------
    >>> def train_func():
    ...     for step in range(10):
    ...         ...  # train
    ...         with tempfile.TemporaryDirectory() as folder:
    ...             torch.save(model.state_dict(), f"{folder}/model.pt")
    ...             report({"loss": loss}, checkpoint=Checkpoint.from_directory(folder))
    """
    _check_checkpoint("checkpoint", checkpoint)
    must_be("a dict of names to values", instance_of(Mapping), TypeError)("metrics", metrics)
    try:
        mode = CheckpointUploadMode(checkpoint_upload_mode)
    except ValueError:
        modes = ", ".join(CheckpointUploadMode.__members__)
        raise ValueError(
            f"checkpoint_upload_mode must be one of {modes}, but is {checkpoint_upload_mode!r}."
        ) from None
    is_function = must_be("a function", callable, TypeError)
    optional(is_function)("checkpoint_upload_fn", checkpoint_upload_fn)
    _check_validation("validation", validation)
    delete = delete_local_checkpoint_after_upload
    if delete is None:
        delete = mode.default_delete_local_checkpoint_after_upload()
    check_bool("delete_local_checkpoint_after_upload", delete)
    requested: dict[str, Any] | None = {} if validation else None
    if isinstance(validation, ValidationTaskConfig):
        validation.check()
        requested = asdict(validation)
    if not is_apart(reports=True):
        session.reporter.report(
            metrics, checkpoint, checkpoint_dir_name, mode, delete, checkpoint_upload_fn, requested
        )


def get_checkpoint() -> Checkpoint | None:
    """Return the latest checkpoint that exists, also of an earlier run of the same name.

    Follows ``ray.train.get_checkpoint``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_checkpoint.html

    Returns
    -------
    Checkpoint or None
        The checkpoint; if there is none, ``resume_from_checkpoint`` of `TorchTrainer`, or None.

    Raises
    ------
    RuntimeError
        If this process is not a rank of a run, or the run has no storage.
    DistributorError
        At the first use in a rank, if the ranks do not share the storage.

    Examples
    --------
    >>> def train_func():
    ...     checkpoint = get_checkpoint()
    ...     if checkpoint is not None:
    ...         with checkpoint.as_directory() as folder:
    ...             model.load_state_dict(torch.load(f"{folder}/model.pt"))
    """
    return session.reporter.latest()


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode | str = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Return the checkpoints that exist, with their metrics.

    Waits for the reports that this rank has made with ``CheckpointUploadMode.ASYNC``, and so for
    the other ranks to make them. If one has failed, the next report raises its error.

    Follows ``ray.train.get_all_reported_checkpoints``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_all_reported_checkpoints.html

    Parameters
    ----------
    consistency_mode : CheckpointConsistencyMode or str, default CheckpointConsistencyMode.VALIDATED
        COMMITTED waits for checkpoints to exist. VALIDATED also waits for their validations.
    timeout_s : float, optional
        Seconds to wait, after which the checkpoints that exist then are returned; by default no
        limit.

    Returns
    -------
    list of ReportedCheckpoint
        The checkpoints, without those that have been removed: the best last if
        ``checkpoint_score_attribute`` ranks them, otherwise the latest last. Metrics of a
        validation have joined those of the report.

    Raises
    ------
    ValueError
        If `consistency_mode` is not a mode.
    RuntimeError
        If this process is not a rank of a run, or the run has no storage.
    DistributorError
        At the first use in a rank, if the ranks do not share the storage; or if validations take
        longer than a day and there is no `timeout_s`.

    Examples
    --------
    >>> def train_func():
    ...     losses = [each.metrics["loss"] for each in get_all_reported_checkpoints()]
    """
    mode = CheckpointConsistencyMode(consistency_mode)
    return session.reporter.all(mode is CheckpointConsistencyMode.VALIDATED, timeout_s)


def get_dataset_shard(dataset_name: str | None = None) -> DatasetShard:
    """Return this rank's part of a dataset of the `TorchTrainer`.

    Follows ``ray.train.get_dataset_shard``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_dataset_shard.html

    Parameters
    ----------
    dataset_name : str, optional
        The name of the dataset, by default "train".

    Returns
    -------
    DatasetShard
        The same object in each call.

    Raises
    ------
    KeyError
        If there is no dataset of this name.
    RuntimeError
        If this process is not a rank of a run.
    """
    session.require_rank("get_dataset_shard")
    name = TRAIN_DATASET_KEY if dataset_name is None else dataset_name
    shards = session.dataset_shards
    if name not in shards:
        known = f"there are {sorted(shards)}" if shards else "the trainer has none"
        raise KeyError(f"There is no dataset {name!r}: {known}. Pass TorchTrainer(datasets=...).")
    return shards[name]


class StorageContext:
    """The run's folder in storage.

    Follows Ray Train's ``StorageContext``, which ``ray.train.get_context().get_storage()`` returns:
    https://docs.ray.io/en/latest/train/user-guides/checkpoints.html

    Parameters
    ----------
    folder : Storage
        The run's folder.
    custom_fs_provided : bool
        Whether the user has passed a file system for the storage path.

    Attributes
    ----------
    storage_filesystem, filesystem : pyarrow.fs.FileSystem
        The file system of the storage path.
    storage_fs_path : str
        The storage path in it.
    experiment_dir_name : str
        The name of the run, and of its folder in the storage path.
    experiment_fs_path, path : str
        The path of that folder.
    custom_fs_provided : bool
        Whether the user has passed `storage_filesystem`.
    read_only : bool
        Always False.

    Examples
    --------
    >>> def train_func():
    ...     storage = get_context().get_storage()
    ...     path = storage.build_checkpoint_path_from_name("epoch_3")
    ...     dcp.save(state, storage_writer=FileSystemWriter(path))
    ...     report({}, Checkpoint(path), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    """

    read_only = False

    def __init__(self, folder: Storage, custom_fs_provided: bool) -> None:
        self.storage_filesystem = self.filesystem = folder.filesystem
        self.experiment_fs_path = self.path = folder.path
        self.storage_fs_path, _, self.experiment_dir_name = folder.path.rpartition("/")
        self.custom_fs_provided = custom_fs_provided

    @property
    def local_working_directory(self) -> str:
        """The working directory of this process."""
        return os.getcwd()

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return the path that a checkpoint of this name has in storage.

        Names such as ``checkpoint_000003`` are those of checkpoints without a name.
        """
        return f"{self.path}/{checkpoint_name}"

    def extract_checkpoint_dir_name_from_path(self, checkpoint_path: str) -> str:
        """Return the name of a checkpoint from its path in storage.

        Raises
        ------
        ValueError
            If the path is not in the run's folder.
        """
        name = os.fspath(checkpoint_path).removeprefix(f"{self.path}/")
        if name == os.fspath(checkpoint_path):
            raise ValueError(f"{checkpoint_path} is not in the run's folder {self.path}.")
        return name

    @staticmethod
    def make_default_checkpoint_dir_name() -> str:
        """Return a name that no checkpoint has, made of the time."""
        return f"checkpoint_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"

    def persist_current_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError: `distributor.train.report` uploads checkpoints."""
        raise RuntimeError(
            "A checkpoint exists only if all ranks report it: call report(metrics, checkpoint), "
            "which uploads it, or copy it to build_checkpoint_path_from_name(name) in a "
            "checkpoint_upload_fn of report."
        )

    def __repr__(self) -> str:
        return f"StorageContext(filesystem={self.filesystem.type_name}, path={self.path})"


class TrainContext:
    """The rank of this process, and the run that it belongs to.

    In a process that is not a rank, it describes the only rank of a world of size 1.

    Follows ``ray.train.TrainContext``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.TrainContext.html

    Examples
    --------
    >>> context = get_context()
    >>> context.get_world_rank(), context.get_world_size()
    (0, 1)
    """

    def get_world_rank(self) -> int:
        """Return this rank's number among all ranks."""
        return this_rank.get_global_rank()

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return this_rank.get_world_size()

    def get_local_rank(self) -> int:
        """Return this rank's number on its node."""
        return this_rank.get_local_rank()

    def get_local_world_size(self) -> int:
        """Return the number of ranks on this node."""
        return this_rank.get_local_world_size()

    def get_node_rank(self) -> int:
        """Return the number of this rank's node."""
        return this_rank.get_node_rank()

    def get_experiment_name(self) -> str:
        """Return the name of the training run; the run's id if it has none."""
        return session.run_name

    def get_storage(self) -> StorageContext:
        """Return the run's folder in storage.

        Raises
        ------
        RuntimeError
            If this process is not a rank of a run, or the run has no storage.
        DistributorError
            At the first use in a rank, if the ranks do not share the storage.
        """
        reporter = session.reporter
        return StorageContext(reporter.storage, reporter.custom_filesystem)

    def get_trial_name(self) -> NoReturn:
        """Raise DeprecationWarning: a run is no trial of Ray Tune."""
        raise DeprecationWarning(_NO_TRIAL)

    get_trial_id = get_trial_dir = get_trial_resources = get_trial_name

    def get_metadata(self) -> NoReturn:
        """Raise DeprecationWarning: pass metadata to the training function."""
        raise DeprecationWarning(_NO_METADATA)


def get_context() -> TrainContext:
    """Return the rank of this process.

    Follows ``ray.train.get_context``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_context.html

    Returns
    -------
    TrainContext
        The context. It can be used in any process.

    Examples
    --------
    >>> get_context().get_local_rank()
    0
    """
    return TrainContext()


def is_preempted() -> bool:
    """Return whether this run is about to lose a process, so that it can save a checkpoint.

    Returns True once for each notice, at the same call in all ranks. A notice comes when Spark
    begins to decommission an executor on a host of the ranks, when a rank receives SIGTERM, or when
    the driver receives SIGTERM while ``run`` waits on its main thread; the driver then ends after
    the next checkpoint that is reported. Report a checkpoint when this returns True, and continue.

    Every rank must call this equally often, usually once per step. Until a notice comes, a call
    costs next to nothing. A rank that calls it on its main thread survives its first SIGTERM,
    unless the program handles SIGTERM itself. No storage is needed. Nodes without a network link to
    the driver receive no notices, and Spark Connect does not report decommissioning.

    Follows no API of Ray Train, which has no equivalent.

    Returns
    -------
    bool
        Whether a notice is due at this call; False in a process that is not a rank.

    Examples
    --------
    >>> for step in range(3):
    ...     if is_preempted() or step % 100 == 99:
    ...         ...  # save, and report
    """
    return session.is_preempted()


def get_preemption_info() -> PreemptionInfo | None:
    """Return which ranks are about to be preempted, from the same call on in all ranks.

    The same notices as those of `is_preempted`, and they come under the same conditions. Every
    rank must call this equally often; calls of the two functions are counted separately.

    Follows ``ray.train.get_preemption_info``:
    https://docs.ray.io/en/latest/train/api/doc/ray.train.get_preemption_info.html

    Returns
    -------
    PreemptionInfo or None
        The hosts of all notices so far, and their ranks; None before the first notice. The deadline
        is not known.

    Raises
    ------
    RuntimeError
        If this process is not a rank of a run.

    Examples
    --------
    >>> def train_func():
    ...     for step in range(1000):
    ...         info = get_preemption_info()
    ...         if info is not None:
    ...             ...  # save, report, and return
    """
    ranks = session.preempted_ranks()
    return None if ranks is None else PreemptionInfo(None, ranks)
