"""One rank's files of a report: uploaded, or saved in the run's folder, and then described."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from distributor.filesystems import describe_error
from distributor.train.checkpoint import Checkpoint, CheckpointUploadMode
from distributor.train.runtime.report_request import ReportRequest
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import StoredFile
from distributor.train.storage.upload_assignment import Assignment


class RankUpload:
    """Puts the files that a rank reports into storage.

    Parameters
    ----------
    storage : Storage
        The run's folder.
    request : ReportRequest
        This rank's part of the report.
    target : str
        The checkpoint's name.
    assignment : callable
        Selects the files that this rank uploads and describes.
    keep : bool
        Whether the files of this machine may still be used afterwards, and not only removed.

    Attributes
    ----------
    name : str or None
        The name of the folder that has this rank's files; None if it reports none.
    error : Exception or None
        Why they could not be uploaded.
    """

    def __init__(
        self,
        storage: Storage,
        request: ReportRequest,
        target: str,
        assignment: Assignment,
        *,
        keep: bool,
    ) -> None:
        self.name: str | None = None
        self.error: Exception | None = None
        self._storage = storage
        self._request = request
        self._target = target
        self._assignment = assignment
        self._keep = keep
        self._uploaded: list[StoredFile] | None = None
        self._others: list[StoredFile] = []

    def run(self) -> None:
        """Upload the files, unless they are in the run's folder; an exception becomes `error`."""
        if self._request.checkpoint is not None:
            try:
                self.name = self._upload(self._request.checkpoint)
            except Exception as error:
                self.error = error

    def _upload(self, checkpoint: Checkpoint) -> str:
        request, target = self._request, self._target
        if request.calls_upload_fn:
            assert request.upload_fn is not None
            return self._name_of(request.upload_fn(checkpoint, target))
        if request.mode is CheckpointUploadMode.NO_UPLOAD:
            return target
        if self._storage.name_of(checkpoint) != target:
            with checkpoint.as_directory() as folder:
                self._uploaded, self._others = self._storage.upload(
                    folder, target, self._assignment, keep=self._keep
                )
        return target

    def _name_of(self, uploaded: object) -> str:
        """Return the name of the checkpoint that the user's function has returned."""
        if not isinstance(uploaded, Checkpoint):
            raise ValueError(
                "checkpoint_upload_fn must return a Checkpoint: the uploaded one, in the run's "
                f"folder. It has returned {uploaded!r}."
            )
        if (name := self._storage.name_of(uploaded)) is None:
            raise ValueError(
                "checkpoint_upload_fn must return a checkpoint that is a folder in the run's "
                f"folder {self._storage.path} ({self._storage.filesystem.type_name}), but has "
                f"returned {uploaded.path} ({uploaded.filesystem.type_name}). Upload to the path "
                "get_context().get_storage().build_checkpoint_path_from_name(checkpoint_dir_name)."
            )
        return name

    def describe(self) -> dict[str, Any]:
        """Return this rank's files as a part of the report, with an error if there is one.

        Called when no rank writes to the checkpoint any more except those that upload.
        """
        part: dict[str, Any] = {"files": None, "other versions": []}
        try:
            if self.error is not None:
                raise self.error
            if self.name is not None:
                files = self._uploaded
                if files is None:
                    files = self._storage.describe(self.name, self._assignment)
                part["files"] = [asdict(file) for file in files]
                part["other versions"] = [asdict(file) for file in self._others]
        except Exception as error:
            part["error"] = describe_error(error)
        return part
