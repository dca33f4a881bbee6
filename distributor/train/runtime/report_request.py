"""What one rank passes to a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from distributor.train.checkpoint import Checkpoint, CheckpointUploadMode

UploadFn = Callable[[Checkpoint, str], Checkpoint]
"""Puts a checkpoint into the run's folder, under a name or another, and returns it there."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """One rank's part of a report.

    Parameters
    ----------
    number : int
        The report's number, the same on all ranks.
    metrics : mapping of str to object
        This rank's metrics, which JSON can represent.
    checkpoint : Checkpoint or None
        The folder that this rank has saved.
    name : str or None
        The checkpoint's name; None for a numbered one.
    mode : CheckpointUploadMode
        Whether the folder is uploaded.
    delete_local : bool
        Whether the folder is removed once the checkpoint exists.
    upload_fn : callable or None
        Uploads the folder; by default its files are copied.
    validation : mapping of str to object or None
        The validation that is requested: the arguments of its ``ValidationTaskConfig``, or none for
        the default one.
    positions : mapping of str to object
        The positions of this rank's data loaders.
    preempted : bool
        Whether the ranks know that the run is about to lose a process.
    in_background : Future of bool
        Set once all ranks have come: whether all that have saved a checkpoint upload it in the
        background.
    """

    number: int
    metrics: Mapping[str, Any]
    checkpoint: Checkpoint | None
    name: str | None
    mode: CheckpointUploadMode
    delete_local: bool
    upload_fn: UploadFn | None
    validation: Mapping[str, Any] | None
    positions: Mapping[str, Any]
    preempted: bool
    in_background: Future[bool] = field(default_factory=Future)

    @property
    def key(self) -> str:
        """The prefix of the report's keys in the store."""
        return f"report/{self.number}"

    @property
    def calls_upload_fn(self) -> bool:
        """Whether this rank has a checkpoint that `upload_fn` uploads."""
        is_uploaded = self.mode is not CheckpointUploadMode.NO_UPLOAD
        return self.upload_fn is not None and self.checkpoint is not None and is_uploaded
