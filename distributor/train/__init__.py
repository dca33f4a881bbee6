"""Training with reports, and with checkpoints that a later run resumes from, as in Ray Train.

This package has what users import, under Ray Train's names. A rank's part is in
`distributor.train.runtime`, and checkpoints in storage are in `distributor.train.storage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from distributor.core.versions import require_arrow

require_arrow("distributor.train")

from distributor.settings.types import check_bool, instance_of, must_be, optional
from distributor.train.config import (
    BackendConfig,
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    SyncConfig,
    TrainRunContext,
    UserCallback,
)
from distributor.train.context import (
    StorageContext,
    TrainContext,
    get_context,
    get_preemption_info,
    is_preempted,
)
from distributor.train.datasets import TRAIN_DATASET_KEY, DataConfig, get_dataset_shard
from distributor.train.errors import (
    ControllerError,
    PreemptionError,
    PreemptionInfo,
    TrainingFailedError,
    WorkerGroupError,
)
from distributor.train.result import Result
from distributor.train.runtime.report_round import UploadFn
from distributor.train.runtime.session import session
from distributor.train.storage.checkpoint import (
    Checkpoint,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
)
from distributor.train.validation import (
    ValidationConfig,
    ValidationFn,
    ValidationTaskConfig,
)
from distributor.unsupported import refuse_modules

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

_check_checkpoint = optional(
    must_be(
        "a Checkpoint, such as Checkpoint.from_directory(folder)",
        instance_of(Checkpoint),
        TypeError,
    )
)
_check_metrics = must_be("a dict of names to values", instance_of(Mapping), TypeError)
_check_upload_fn = optional(must_be("a function", callable, TypeError))
_check_validation = optional(
    must_be(
        "True, False or a ValidationTaskConfig",
        instance_of(bool, ValidationTaskConfig),
        TypeError,
    )
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
    _check_metrics("metrics", metrics)
    try:
        mode = CheckpointUploadMode(checkpoint_upload_mode)
    except ValueError:
        modes = ", ".join(CheckpointUploadMode.__members__)
        raise ValueError(
            f"checkpoint_upload_mode must be one of {modes}, but is {checkpoint_upload_mode!r}."
        ) from None
    _check_upload_fn("checkpoint_upload_fn", checkpoint_upload_fn)
    _check_validation("validation", validation)
    delete = delete_local_checkpoint_after_upload
    if delete is not None:
        check_bool("delete_local_checkpoint_after_upload", delete)
    else:
        delete = mode.default_delete_local_checkpoint_after_upload()
    requested: dict[str, Any] | None = {} if validation else None
    if isinstance(validation, ValidationTaskConfig):
        validation.check()
        requested = asdict(validation)
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
