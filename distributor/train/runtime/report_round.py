"""One report as a round of all ranks: each uploads its files, then rank 0 commits or refuses."""

from __future__ import annotations

import os
import shutil
from typing import Any

from distributor.core.text import counted
from distributor.errors import DistributorError, OtherRankFailed
from distributor.filesystems import describe_error, is_local
from distributor.rank.context import worker_context
from distributor.rank.messages import Reported
from distributor.train.checkpoint import CheckpointUploadMode
from distributor.train.runtime.rank_upload import RankUpload
from distributor.train.runtime.report_request import ReportRequest
from distributor.train.runtime.resume import ResumePoint
from distributor.train.runtime.store_channel import UPLOAD_TIMEOUT_SECONDS, StoreChannel
from distributor.train.storage.checkpoint_manager import CheckpointManager, failed_upload
from distributor.train.storage.checkpoint_store import PREFIX, Storage
from distributor.train.storage.report_log import Report
from distributor.train.storage.upload_assignment import (
    assign_among_ranks,
    files_of,
    identities_of,
)


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
        removes = request.delete_local and self._is_removable(request)
        self._channel.set_own(request.key, self._own_part(request, agreed, keep=not removes))
        decision = self._channel.decide(
            request.key, lambda: self._decide(request), UPLOAD_TIMEOUT_SECONDS
        )
        self._channel.delete_keys()
        if decision["committed"]:
            self.latest, self._next_index = decision["committed"], self._next_index + 1
            if removes and request.checkpoint is not None:
                shutil.rmtree(request.checkpoint.path, ignore_errors=True)

    def finish(self, number: int) -> None:
        """Finish the reports, and let no other rank wait for one of this rank.

        Parameters
        ----------
        number : int
            The number of reports that this rank has made.
        """
        if self._channel.rank == 0:
            self._manager.finish()
        self._channel.leave(
            f"report/{number}/come", f"has returned after {counted(number, 'report')}"
        )

    def _agree(self, request: ReportRequest) -> dict[str, Any]:
        """Wait for all ranks, and agree on the checkpoint's name and on whose files are kept."""
        agreed: dict[str, Any] = self._channel.agree(
            f"{request.key}/come",
            self._offer(request),
            lambda offers: self._decide_name(request, offers),
        )
        if request.name not in (None, agreed["name"]) and not self._has_warned:
            self._has_warned = True
            print(
                f"distributor: checkpoint_dir_name is {request.name!r} on rank "
                f"{self._channel.rank}, but the checkpoint's name is {agreed['name']!r}.",
                flush=True,
            )
        return agreed

    def _offer(self, request: ReportRequest) -> dict[str, Any]:
        """Return what the ranks need to know of this one before they upload."""
        offer: dict[str, Any] = {
            "name": request.name,
            "mode": None,
            "folder": None,
            "calls upload fn": request.calls_upload_fn,
        }
        if (checkpoint := request.checkpoint) is not None:
            offer["mode"] = request.mode.value
            offer["folder"] = self._storage.name_of(checkpoint)
        return offer

    def _decide_name(self, request: ReportRequest, offers: list[dict[str, Any]]) -> dict[str, Any]:
        """Decide the checkpoint's name, and how files become part of it. Rank 0 only."""
        given = (each["name"] for each in offers if each["name"] is not None)
        name = next(given, f"{PREFIX}{self._next_index:06d}")
        for rank, each in enumerate(offers):
            if each["mode"] == "NO_UPLOAD" and each["folder"] != name:
                raise DistributorError(
                    f"Rank {rank} reports the folder {each['folder']!r} with NO_UPLOAD, but the "
                    f"checkpoint's name is {name!r}. All ranks must report one folder."
                )
        calls_upload_fn = _calls_upload_fn(offers)
        in_place = [each["folder"] == name for each in offers]
        self._free_name(name, keep_files=calls_upload_fn or any(in_place))
        files = _identities_of_local_files(request)
        return {
            "name": name,
            "files of rank 0": dict.fromkeys(files, "") if in_place[0] else files,
            "calls upload fn": calls_upload_fn,
            "in background": {each["mode"] for each in offers} - {None} == {"ASYNC"},
        }

    def _free_name(self, name: str, *, keep_files: bool) -> None:
        """Remove a damaged checkpoint, whose name could otherwise never be used again."""
        if name in self._damaged:
            self._damaged.discard(name)
            if keep_files:  # ranks have saved the new ones among them
                self._storage.uncommit(name)
            else:
                self._storage.remove(name)

    def _own_part(
        self, request: ReportRequest, agreed: dict[str, Any], *, keep: bool
    ) -> dict[str, Any]:
        """Upload this rank's files, and return its part of the report, with an error if any."""
        name, files_of_rank_0 = agreed["name"], agreed["files of rank 0"]
        assignment = assign_among_ranks(self._channel, f"{request.key}/files", files_of_rank_0)
        upload = RankUpload(self._storage, request, name, assignment, keep=keep)
        upload.run()
        if agreed["calls upload fn"]:
            name = self._agree_on_folder(request, upload, name)
        return {
            "name": name,
            "metrics": request.metrics,
            "positions": request.positions,
            "preempted": request.preempted,
            "validation": request.validation,
            **upload.describe(),
        }

    def _agree_on_folder(self, request: ReportRequest, upload: RankUpload, target: str) -> str:
        """Wait until all ranks have uploaded, and return the name under which they have."""
        offer = {"name": upload.name, "error": None}
        if upload.error is not None:
            offer["error"] = describe_error(upload.error)
        agreed = self._channel.agree(
            f"{request.key}/uploaded",
            offer,
            lambda offers: self._decide_folder(offers, target),
            UPLOAD_TIMEOUT_SECONDS,
        )
        if "name" in agreed:
            return str(agreed["name"])
        self._channel.await_readers(f"{request.key}/uploaded")
        self._channel.delete_keys()
        if upload.error is not None:
            raise upload.error  # perhaps of the user's function
        raise (OtherRankFailed if agreed["has failed"] else DistributorError)(agreed["error"])

    def _decide_folder(self, offers: list[dict[str, Any]], target: str) -> dict[str, Any]:
        """Decide the name of the folder that all ranks have uploaded to. Rank 0 only."""
        for rank, each in enumerate(offers):
            if each["error"] is not None:
                why = failed_upload(rank, self._storage.path, each["error"])
                return {"error": why, "has failed": True}
        names = {each["name"]: rank for rank, each in enumerate(offers) if each["name"] is not None}
        if len(names) > 1:
            found = ", ".join(f"rank {rank} to {name!r}" for name, rank in names.items())
            why = (
                f"The ranks have uploaded one checkpoint to several folders: {found}. "
                "checkpoint_upload_fn must upload to the folder that its second argument names, or "
                "to one other folder on all ranks."
            )
            return {"error": why, "has failed": False}
        name = next(iter(names), target)
        self._free_name(name, keep_files=True)
        return {"name": name}

    def _is_removable(self, request: ReportRequest) -> bool:
        """Return whether the reported folder is on this machine, and not itself in storage."""
        checkpoint = request.checkpoint
        return (
            checkpoint is not None
            and request.mode is not CheckpointUploadMode.NO_UPLOAD
            and is_local(checkpoint.filesystem)
            and not self._storage.contains(checkpoint)
        )

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
            self._add(report, parts)
            self._notify_driver(report.checkpoint, parts)
            return {"committed": report.checkpoint}
        except DistributorError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": describe_error(error)}

    def _add(self, report: Report, parts: list[dict[str, Any]]) -> None:
        try:
            self._manager.add(report, self._next_index, parts)
        except DistributorError:
            raise
        except Exception as error:
            raise DistributorError(
                f"The report could not be stored in {self._storage.path}: {describe_error(error)}"
            ) from error

    def _notify_driver(self, committed: str | None, parts: list[dict[str, Any]]) -> None:
        path = self._storage.checkpoint(committed).path if committed else None
        metrics = [part["metrics"] for part in parts]
        worker_context().send(Reported(metrics, path, parts[0]["preempted"]))


def _identities_of_local_files(request: ReportRequest) -> dict[str, str]:
    """Return the identities of the files that this rank copies to storage.

    Called once all ranks have come: in a folder that they share, another rank may have been writing
    a file until then, which changes its identity.
    """
    checkpoint = request.checkpoint
    if checkpoint is None or request.calls_upload_fn or not is_local(checkpoint.filesystem):
        return {}
    try:
        return identities_of(files_of(checkpoint.path))
    except OSError as error:
        raise DistributorError(
            f"The checkpoint in {checkpoint.path} cannot be read: {error}."
        ) from error


def _calls_upload_fn(offers: list[dict[str, Any]]) -> bool:
    """Return whether the user's functions upload the checkpoint.

    Raises
    ------
    DistributorError
        If they do on some ranks only: a function could replace files while they are uploaded.
    """
    calls = [rank for rank, each in enumerate(offers) if each["calls upload fn"]]
    copies = [
        rank
        for rank, each in enumerate(offers)
        if each["mode"] not in (None, "NO_UPLOAD") and rank not in calls
    ]
    if calls and copies:
        raise DistributorError(
            f"Rank {calls[0]} passes a checkpoint_upload_fn, but rank {copies[0]} does not. Pass "
            "it on all ranks that report a checkpoint, or on none."
        )
    return bool(calls)
