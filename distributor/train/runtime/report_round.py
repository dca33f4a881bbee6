"""One report as a round of all ranks: each uploads its files, then rank 0 commits or refuses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from distributor.core.telemetry import Reported
from distributor.core.text import counted
from distributor.errors import DistributorError
from distributor.node.worker.worker_context import worker_context
from distributor.train.checkpoint import Checkpoint, CheckpointUploadMode
from distributor.train.runtime.resume import ResumePoint
from distributor.train.runtime.store_channel import UPLOAD_TIMEOUT_SECONDS, StoreChannel
from distributor.train.storage.checkpoint_manager import CheckpointManager
from distributor.train.storage.checkpoint_store import PREFIX, Storage
from distributor.train.storage.filesystems import is_local
from distributor.train.storage.manifest import StoredFile
from distributor.train.storage.report_log import Report
from distributor.train.storage.upload_assignment import (
    Assignment,
    assign_among_ranks,
    files_of,
    identities_of,
)


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
    positions: Mapping[str, Any]
    preempted: bool
    in_background: Future[bool] = field(default_factory=Future)

    @property
    def key(self) -> str:
        """The prefix of the report's keys in the store."""
        return f"report/{self.number}"


class ReportRounds:
    """Makes reports together with the other ranks; to be used by one thread.

    Parameters
    ----------
    channel : StoreChannel
        How the ranks exchange their parts.
    storage : Storage
        The run's folder.
    manager : CheckpointManager
        The run's reports and checkpoints; only rank 0 uses it.
    start : ResumePoint
        The state that the training starts from.

    Attributes
    ----------
    latest : str or None
        The name of the latest checkpoint that exists.
    """

    def __init__(
        self,
        channel: StoreChannel,
        storage: Storage,
        manager: CheckpointManager,
        start: ResumePoint,
    ) -> None:
        self.latest = start.latest
        self._next_index = start.next_index
        self._damaged = set(start.damaged)
        self._channel = channel
        self._storage = storage
        self._manager = manager
        self._has_warned = False

    def run(self, request: ReportRequest) -> None:
        """Make one report.

        Raises
        ------
        DistributorError
            If the report is refused, on all ranks alike, or a rank does not take part.
        ConnectionError
            If rank 0, which holds the store, has ended.
        """
        try:
            agreed = self._agree(request)  # other ranks may still be saving before this
        except BaseException as error:
            request.in_background.set_exception(error)
            raise
        request.in_background.set_result(agreed["in background"])
        target = agreed["name"] or f"{PREFIX}{self._next_index:06d}"
        self._free_name(target)
        removes = request.delete_local and self._is_removable(request)
        assignment = assign_among_ranks(
            self._channel, f"{request.key}/files", agreed["files of rank 0"]
        )
        part = self._own_part(request, target, assignment, keep=not removes)
        self._channel.set_own(request.key, part)
        if self._channel.rank == 0:
            self._channel.set(request.key, self._decide(request))
        decision = self._channel.get(request.key, UPLOAD_TIMEOUT_SECONDS)
        self._channel.delete_keys()
        if "error" in decision:
            raise DistributorError(decision["error"])
        if decision["committed"]:
            self.latest, self._next_index = decision["committed"], self._next_index + 1
            if removes and request.checkpoint is not None:
                shutil.rmtree(request.checkpoint.path, ignore_errors=True)

    def finish(self, number: int) -> None:
        """Write the run's log a last time, and let no other rank wait for a report of this one.

        Parameters
        ----------
        number : int
            The number of reports that this rank has made.
        """
        if self._channel.rank == 0:
            self._manager.write_log()
        self._channel.leave(
            f"report/{number}/come", f"has returned after {counted(number, 'report')}"
        )

    def _agree(self, request: ReportRequest) -> dict[str, Any]:
        """Wait for all ranks, and return the name of the checkpoint and rank 0's files."""
        checkpoint = request.checkpoint
        mode = None if checkpoint is None else request.mode.value
        offer: dict[str, Any] = {"name": request.name, "mode": mode, "files": {}}
        if self._channel.rank == 0 and checkpoint is not None and is_local(checkpoint.filesystem):
            offer["files"] = identities_of(files_of(checkpoint.path))
        agreed: dict[str, Any] = self._channel.agree(
            f"{request.key}/come",
            offer,
            lambda offers: {
                "name": next((each["name"] for each in offers if each["name"] is not None), None),
                "files of rank 0": offers[0]["files"],
                "in background": {each["mode"] for each in offers} - {None} == {"ASYNC"},
            },
        )
        if request.name not in (None, agreed["name"]) and not self._has_warned:
            self._has_warned = True
            print(
                f"distributor: checkpoint_dir_name is {request.name!r} on rank "
                f"{self._channel.rank}, but the checkpoint's name is {agreed['name']!r}.",
                flush=True,
            )
        return agreed

    def _free_name(self, target: str) -> None:
        """Remove a damaged checkpoint, whose name could otherwise never be used again."""
        if target in self._damaged and self._channel.rank == 0:
            self._storage.remove(target)
        self._damaged.discard(target)

    def _is_removable(self, request: ReportRequest) -> bool:
        """Return whether the reported folder is on this machine, and not itself in storage."""
        checkpoint = request.checkpoint
        return (
            checkpoint is not None
            and request.mode is not CheckpointUploadMode.NO_UPLOAD
            and is_local(checkpoint.filesystem)
            and not self._storage.contains(checkpoint)
        )

    def _own_part(
        self, request: ReportRequest, target: str, assignment: Assignment, keep: bool
    ) -> dict[str, Any]:
        """Upload this rank's files, and return its part of the report, with an error if any."""
        part: dict[str, Any] = {
            "name": target,
            "metrics": request.metrics,
            "files": None,
            "other versions": [],
            "positions": request.positions,
            "preempted": request.preempted,
        }
        try:
            if request.checkpoint is not None:
                uploaded, others = self._upload(
                    request, request.checkpoint, target, assignment, keep
                )
                part["files"] = [asdict(file) for file in uploaded]
                part["other versions"] = [asdict(file) for file in others]
        except Exception as error:
            part["error"] = f"{type(error).__name__}: {error}"
        return part

    def _upload(
        self,
        request: ReportRequest,
        checkpoint: Checkpoint,
        target: str,
        assignment: Assignment,
        keep: bool,
    ) -> tuple[list[StoredFile], list[StoredFile]]:
        in_storage = request.mode is CheckpointUploadMode.NO_UPLOAD
        if in_storage and request.name != target:
            raise DistributorError(
                f"With NO_UPLOAD its name is that of its folder, {request.name!r}, but the "
                f"checkpoint's name is {target!r}."
            )
        if in_storage or self._storage.contains(checkpoint, target):
            return self._storage.describe(target, assignment), []
        with checkpoint.as_directory() as folder:
            return self._storage.upload(folder, target, assignment, keep=keep)

    def _decide(self, request: ReportRequest) -> dict[str, Any]:
        """Wait for all ranks, and commit what they have uploaded. Rank 0 only."""
        try:
            parts = self._channel.gather(request.key, UPLOAD_TIMEOUT_SECONDS)
            names = (part["name"] for part in parts if part["files"] is not None)
            report = Report(
                number=request.number,
                metrics=parts[0]["metrics"],
                checkpoint=next(names, None),
                world_size=self._channel.size,
                attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
            self._manager.add(report, self._next_index, parts)
            self._notify_driver(report.checkpoint, parts)
            return {"committed": report.checkpoint}
        except DistributorError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _notify_driver(self, committed: str | None, parts: list[dict[str, Any]]) -> None:
        path = self._storage.checkpoint(committed).path if committed else None
        metrics = [part["metrics"] for part in parts]
        worker_context().send(Reported(metrics, path, parts[0]["preempted"]))
