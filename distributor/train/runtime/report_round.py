"""One report as a round of all ranks: each uploads its files, then rank 0 commits or refuses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from distributor.core.text import counted
from distributor.errors import DistributorError, OtherRankFailed
from distributor.filesystems import describe_error, is_local
from distributor.rank.context import worker_context
from distributor.rank.messages import Reported
from distributor.train.runtime.resume import ResumePoint
from distributor.train.runtime.store_channel import UPLOAD_TIMEOUT_SECONDS, StoreChannel
from distributor.train.storage.checkpoint import Checkpoint, CheckpointUploadMode
from distributor.train.storage.checkpoint_manager import CheckpointManager, failed_upload
from distributor.train.storage.checkpoint_store import PREFIX, Assignment, Storage
from distributor.train.storage.files import files_of, identities_of
from distributor.train.storage.manifest import StoredFile
from distributor.train.storage.report_log import Report

UploadFn = Callable[[Checkpoint, str], Checkpoint]
"""Puts a checkpoint into the run's folder, under a name or another, and returns it there."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """One rank's part of a report."""

    number: int  # the same on all ranks
    metrics: Mapping[str, Any]  # which JSON can represent
    checkpoint: Checkpoint | None
    name: str | None  # of the checkpoint; None for a numbered one
    mode: CheckpointUploadMode
    delete_local: bool
    upload_fn: UploadFn | None
    validation: Mapping[str, Any] | None  # arguments of its ValidationTaskConfig; {}: the default
    positions: Mapping[str, Any]  # of this rank's data loaders
    preempted: bool  # whether the ranks know that the run is about to lose a process
    # Set once all ranks have come: whether all that have saved a checkpoint upload it in the
    # background.
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


@dataclass
class _Upload:
    """The files of a rank in storage."""

    name: str | None = None  # of their folder; None if the rank reports none
    files: list[StoredFile] | None = None  # None if the rank has copied none
    others: list[StoredFile] = field(default_factory=list)  # versions that other ranks replace
    error: Exception | None = None  # why they could not be uploaded


class ReportRounds:
    """Makes reports together with the other ranks; to be used by one thread.

    `latest` is the name of the latest checkpoint that exists. Only rank 0 uses the manager.
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
        """Make one report; raises DistributorError if it is refused, on all ranks alike."""
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
        """Finish after so many reports of this rank, and let no other rank wait for another one."""
        if self._channel.rank == 0:
            self._manager.finish()
        self._channel.leave(
            f"report/{number}/come", f"has returned after {counted(number, 'report')}"
        )

    def _agree(self, request: ReportRequest) -> dict[str, Any]:
        """Wait for all ranks, and agree on the checkpoint's name and on whose files are kept."""
        checkpoint = request.checkpoint
        offer = {
            "name": request.name,
            "mode": None if checkpoint is None else request.mode.value,
            "folder": None if checkpoint is None else self._storage.name_of(checkpoint),
            "calls upload fn": request.calls_upload_fn,
        }
        agreed: dict[str, Any] = self._channel.agree(
            f"{request.key}/come", offer, lambda offers: self._decide_name(request, offers)
        )
        if request.name not in (None, agreed["name"]) and not self._has_warned:
            self._has_warned = True
            print(
                f"distributor: checkpoint_dir_name is {request.name!r} on rank "
                f"{self._channel.rank}, but the checkpoint's name is {agreed['name']!r}.",
                flush=True,
            )
        return agreed

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
        upload = _Upload()
        try:
            self._upload(upload, request, name, assignment, keep=keep)
        except Exception as error:
            upload.error = error
        if agreed["calls upload fn"]:
            name = self._agree_on_folder(request, upload, name)
        part: dict[str, Any] = {
            "name": name,
            "metrics": request.metrics,
            "positions": request.positions,
            "preempted": request.preempted,
            "validation": request.validation,
            "files": None,
            "other versions": [asdict(file) for file in upload.others],
        }
        # From here on, no rank writes to the checkpoint any more except those that upload.
        try:
            if upload.error is not None:
                raise upload.error
            if upload.name is not None:
                files = upload.files
                if files is None:
                    files = self._storage.describe(upload.name, assignment)
                part["files"] = [asdict(file) for file in files]
        except Exception as error:
            part["error"] = describe_error(error)
        return part

    def _upload(
        self,
        upload: _Upload,
        request: ReportRequest,
        target: str,
        assignment: Assignment,
        *,
        keep: bool,
    ) -> None:
        """Upload this rank's files to the checkpoint `target`, unless they are in the run's folder.

        With `keep`, the files of this machine may still be used afterwards, and not only removed.
        """
        checkpoint = request.checkpoint
        if checkpoint is None:
            return
        if request.calls_upload_fn:
            assert request.upload_fn is not None
            upload.name = self._name_of(request.upload_fn(checkpoint, target))
            return
        is_uploaded = request.mode is not CheckpointUploadMode.NO_UPLOAD
        if is_uploaded and self._storage.name_of(checkpoint) != target:
            with checkpoint.as_directory() as folder:
                upload.files, upload.others = self._storage.upload(
                    folder, target, assignment, keep=keep
                )
        upload.name = target

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

    def _agree_on_folder(self, request: ReportRequest, upload: _Upload, target: str) -> str:
        """Wait until all ranks have uploaded, and return the name under which they have."""
        error = None if upload.error is None else describe_error(upload.error)
        agreed = self._channel.agree(
            f"{request.key}/uploaded",
            {"name": upload.name, "error": error},
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
            try:
                self._manager.add(report, self._next_index, parts)
            except DistributorError:
                raise
            except Exception as error:
                why = describe_error(error)
                return {"error": f"The report could not be stored in {self._storage.path}: {why}"}
            name = report.checkpoint
            path = self._storage.checkpoint(name).path if name else None
            metrics = [part["metrics"] for part in parts]
            worker_context().send(Reported(metrics, path, parts[0]["preempted"]))
            return {"committed": name}
        except DistributorError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": describe_error(error)}


def assign_among_ranks(channel: StoreChannel, key: str, of_rank_0: Mapping[str, str]) -> Assignment:
    """Return an assignment in which the rank that first claims a file uploads it.

    The ranks of a node often save into one folder, which each of them then reports. Files that
    another rank has already claimed are skipped. Of different files of one name, that of rank 0 is
    uploaded, whose identities are `of_rank_0`.
    """

    def assign(files: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        names = list(files)
        first = len(names) * channel.rank // channel.size  # each rank begins at another file
        for name in [*names[first:], *names[:first]]:
            if of_rank_0.get(name, files[name]) != files[name]:
                yield name, False
                continue
            own_claim = f"{channel.rank} {files[name]}"
            claim = channel.set_first(f"{key}/{name!a}", own_claim)
            if claim == own_claim:
                yield name, True
            elif claim.partition(" ")[2] != files[name]:
                yield name, False

    return assign


def _identities_of_local_files(request: ReportRequest) -> dict[str, str]:
    """Return the identities of the files that this rank copies to storage."""
    # Called once all ranks have come: in a folder that they share, another rank may have been
    # writing a file until then, which changes its identity.
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
    """Return whether the user's functions upload the checkpoint, on all ranks that report one."""
    calls = [rank for rank, each in enumerate(offers) if each["calls upload fn"]]
    copies = [
        rank
        for rank, each in enumerate(offers)
        if each["mode"] not in (None, "NO_UPLOAD") and rank not in calls
    ]
    if calls and copies:  # a function could replace files while they are uploaded
        raise DistributorError(
            f"Rank {calls[0]} passes a checkpoint_upload_fn, but rank {copies[0]} does not. Pass "
            "it on all ranks that report a checkpoint, or on none."
        )
    return bool(calls)
