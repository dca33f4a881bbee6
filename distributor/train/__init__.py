"""Training with reports and checkpoints that a later run resumes from, in Ray Train's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributor.train.checkpoint import Checkpoint
from distributor.train.config import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainRunContext,
    UserCallback,
)
from distributor.train.context import TrainContext, get_context
from distributor.train.result import Result
from distributor.train.runtime import preemption
from distributor.train.runtime.reporter import CheckpointUploadMode, ReportedCheckpoint, current

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointUploadMode",
    "FailureConfig",
    "ReportedCheckpoint",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainContext",
    "TrainRunContext",
    "UserCallback",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "is_preempted",
    "report",
]


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
) -> None:
    """Report metrics, and perhaps a checkpoint, together with all other ranks.

    A checkpoint is all that the ranks save in theirs, and exists once all of it is in storage.
    Every rank calls this as often as the others. Where several have saved into one folder, each
    reports it, and its files are brought to storage once.

    Parameters
    ----------
    metrics : mapping of str to object
        What was measured, as JSON can hold it; rank 0's is recorded.
    checkpoint : Checkpoint, optional
        What this rank has saved. Ranks that have saved nothing give none.
    checkpoint_dir_name : str, optional
        The checkpoint's folder; by default ``checkpoint_000003`` and so on. The same on all ranks.
    checkpoint_upload_mode : CheckpointUploadMode
        SYNC: it exists when this returns. ASYNC: this returns at once, and it exists some time
        later, in the order of the reports. NO_UPLOAD: it lies in storage already, in the folder
        `checkpoint_dir_name` of the run's folder.
    delete_local_checkpoint_after_upload : bool, optional
        Whether this rank's own folder is removed then; by default where the mode is ASYNC. Its
        files are not copied where storage is on the same disk.

    Raises
    ------
    DistributorError
        Where a rank could not bring its files to storage, where there are none, where ranks differ
        in the checkpoint's name, or where one does not report. With ASYNC the next report raises
        it, or the run's end.
    RuntimeError
        Outside a run, or in one without storage.
    TypeError
        For metrics that JSON cannot hold, numbers of tensors excepted, and what is no checkpoint.
    """
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"checkpoint is made by Checkpoint.from_directory, but is {checkpoint!r}.")
    mode = CheckpointUploadMode(checkpoint_upload_mode)
    delete = delete_local_checkpoint_after_upload
    if delete is None:
        delete = mode is CheckpointUploadMode.ASYNC
    current().report(metrics, checkpoint, checkpoint_dir_name, mode, delete)


def is_preempted() -> bool:
    """Tell whether this run is about to lose a process: a chance to report a checkpoint.

    True once, at the same call in all ranks, after Spark has begun to decommission an executor on
    one of their hosts, a rank has had a SIGTERM, or the driver has had one while ``run`` waits on
    its main thread; it then ends with the next checkpoint that is reported. So report, and go on.

    Every rank calls this as often as the others, once in each step: that costs next to nothing
    until a notice comes. A rank that calls it on its main thread, where SIGTERM has no handler,
    outlives its first one. It needs no storage, and outside a run it is False. Nodes without a
    link to the driver hear of nothing, and through Connect decommissioning is not known of.

    Examples
    --------
    >>> for step in range(3):
    ...     if is_preempted() or step % 100 == 99:
    ...         ...  # save, and report
    """
    return preemption.is_preempted()


def get_checkpoint() -> Checkpoint | None:
    """Give the latest checkpoint that exists, of an earlier run of this name too; or None."""
    return current().latest()


def get_all_reported_checkpoints() -> list[ReportedCheckpoint]:
    """List the checkpoints that exist, with what was reported, the oldest first."""
    return current().all()
