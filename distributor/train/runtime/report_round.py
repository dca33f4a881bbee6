"""Rounds of all ranks: one before the first report, and one for each report.

In the first, ranks check their storage and agree where to resume. In the others, each uploads its
files, and then rank 0 commits or refuses.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from distributor.core.addresses import host_name
from distributor.core.rank_variables import CheckpointSettings
from distributor.core.text import counted
from distributor.errors import DistributorError, OtherRankFailed
from distributor.filesystems import describe_error, is_local
from distributor.rank.context import worker_context
from distributor.rank.messages import Reported
from distributor.rank.store_channel import UPLOAD_TIMEOUT_SECONDS, StoreChannel
from distributor.train.storage.checkpoint import Checkpoint, CheckpointUploadMode
from distributor.train.storage.checkpoint_manager import CheckpointManager, Report, failed_upload
from distributor.train.storage.checkpoint_store import (
    PREFIX,
    Assignment,
    Storage,
    stored_positions,
)
from distributor.train.storage.files import (
    Damaged,
    StoredFile,
    break_hardlinks,
    check_parts,
    files_of,
    identities_of,
    read_share,
)

UploadFn = Callable[[Checkpoint, str], Checkpoint]
"""Puts a checkpoint into the run's folder, under a name or another, and returns it there."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What one rank reports."""

    number: int  # the same on all ranks
    checkpoint: Checkpoint | None
    name: str | None  # of the checkpoint; None for a numbered one
    mode: CheckpointUploadMode
    delete_local: bool  # whether it is a folder of this machine to be removed once it is in storage
    upload_fn: UploadFn | None  # uploads the checkpoint of this rank, if it has one
    # For rank 0, which JSON can represent: "metrics", "positions" of this rank's data loaders,
    # "preempted", whether the ranks know that the run is about to lose a process, and
    # "validation", the arguments of its ValidationTaskConfig, if requested; {}: the default.
    part: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> str:
        """The prefix of the report's keys in the store."""
        return f"report/{self.number}"


class ReportRounds:
    """Makes reports together with the other ranks; to be used by one thread.

    All ranks create this together, but for one that joins them: they check that they share the
    storage, and find the checkpoint to resume from. Each reads its share of the files of the latest
    one; if a file is damaged, the checkpoint before is used. Without any, the training resumes from
    `resume_from`, if given.

    Attributes
    ----------
    latest : str or None
        The name of the latest checkpoint that exists, and is not damaged.
    num_reports : int
        The number of reports up to the checkpoint from which the training resumes.
    positions : mapping
        Those of the data loaders in it.
    """

    def __init__(
        self,
        channel: StoreChannel,
        storage: Storage,
        settings: CheckpointSettings,
        resume_from: Checkpoint | None,
        *,
        joins: bool = False,
    ) -> None:
        self._channel = channel
        self._storage = storage
        self._is_writer = channel.rank == 0 and not joins  # of the log of reports
        self._next_index = 0
        self._damaged: set[str] = set()
        self.latest: str | None
        self.num_reports = 0
        self.positions: Mapping[str, Any] = {}
        self._manager = CheckpointManager(storage, settings)  # only rank 0 uses it
        self._num_added = 0  # of the reports, by it
        self._unlogged: list[Report] = []  # which a lost rank 0 has not written
        self._has_warned = False
        if joins:
            committed = storage.committed()
            self.latest = committed[-1][0] if committed else None
            return
        begin = self._check_storage()
        self._next_index = begin["next"]
        self.latest = next(filter(self._is_intact, begin["committed"]), None)

        def resume(_: object) -> dict[str, Any]:
            checkpoint = storage.checkpoint(self.latest) if self.latest else resume_from
            reports = self._manager.resume_from(self.latest, begin["unfinished"])
            return {"reports": reports, "positions": stored_positions(checkpoint)}

        found = channel.agree("resume", None, resume)
        self.num_reports, self.positions = found["reports"], found["positions"]

    def save(self) -> tuple[int, str | None, list[Report]]:
        """Return what a process must know that takes the place of a lost rank."""
        return self._next_index, self.latest, self._unlogged

    def load(self, saved: tuple[int, str | None, list[Report]]) -> None:
        """Set what `save` has returned on another rank."""
        self._next_index, self.latest, self._unlogged = saved

    def exchange_over(self, channel: StoreChannel) -> None:
        """Exchange the next reports with the ranks of this channel."""
        if self._is_writer and channel.rank != 0:
            self._is_writer = False
            self._manager.write_log()  # another rank goes on from there
        self._channel = channel

    def _take_over(self) -> None:
        """On rank 0, go on with the reports of a rank that was lost, as far as it has made them."""
        if not self._is_writer:
            self._is_writer = True
            committed = self._storage.committed()
            self._manager.take_over(committed[-1][0] if committed else None, self._unlogged)
            indices = [manifest.index for _, manifest in committed]
            self._next_index = max(self._next_index, 1 + max(indices, default=-1))

    def _check_storage(self) -> dict[str, Any]:
        """Check that all ranks share the storage, and return what rank 0 finds there."""
        file = f".proof-{secrets.token_hex(8)}"
        proof = {"host": host_name(), "file": file}
        try:
            self._storage.write(file, b"\n")
        except Exception as error:
            proof = {"host": host_name(), "error": describe_error(error)}
        try:
            found: dict[str, Any] = self._channel.agree("begin", proof, self._survey)
        except DistributorError:
            with contextlib.suppress(Exception):  # it is where rank 0 does not see it
                self._storage.remove_files([file])
            raise
        return found

    def _survey(self, proofs: list[dict[str, str]]) -> dict[str, Any]:
        """Return the checkpoints that exist, the latest first, and what earlier attempts left.

        Raises an error that names the ranks whose proofs rank 0 does not see.
        """
        path, own = self._storage.path, proofs[0]
        written = [proof["file"] for proof in proofs if "file" in proof]
        if "error" in own:
            with contextlib.suppress(Exception):  # it may not be reached
                self._storage.remove_files(written)
            raise DistributorError(
                f"Rank 0 on {own['host']} cannot write to {path}: {own['error']}"
            )
        seen = self._storage.remove_files(written)
        failures = [
            f"rank {rank} on {proof['host']}: {proof.get('error', 'its files do not appear there')}"
            for rank, proof in enumerate(proofs)
            if proof.get("file") not in seen
        ]
        if failures:
            raise DistributorError(
                f"The ranks do not share the storage that rank 0 on {own['host']} sees at {path}: "
                f"{'; '.join(failures)}. storage_path must be a folder that all nodes mount and "
                "can write to, or an address such as s3://bucket/runs."
            )
        survey = self._storage.survey()
        for name in survey.damaged:
            print(f"distributor: {name} is skipped: its manifest is damaged.", flush=True)
        return {
            "committed": [name for name, _ in reversed(survey.committed)],
            "unfinished": survey.unfinished,
            "next": survey.next_index,
        }

    def _is_intact(self, name: str) -> bool:
        """Return whether a checkpoint is undamaged: each rank reads its share of the bytes."""
        manifest, checkpoint = self._storage.manifest_of(name), self._storage.checkpoint(name)
        rank, size = self._channel.rank, self._channel.size
        share: dict[str, Any] = {"damage": None}
        try:
            if manifest is None:
                raise Damaged(f"rank {rank} cannot read its manifest")
            parts = read_share(checkpoint, manifest.files, rank, size)
            share["parts"] = [asdict(part) for part in parts]
            break_hardlinks(checkpoint, manifest.files[rank::size])
        except Damaged as damage:
            share["damage"] = str(damage)

        def find_damages(shares: list[dict[str, Any]]) -> list[str]:
            damages = [share["damage"] for share in shares if share["damage"]]
            if manifest is not None and not damages:
                parts = [StoredFile(**part) for share in shares for part in share["parts"]]
                try:
                    check_parts(checkpoint, manifest.files, parts)
                except Damaged as damage:
                    damages.append(str(damage))
            if damages:
                print(f"distributor: {name} is skipped: {'; '.join(damages)}.", flush=True)
            return damages

        if self._channel.agree(f"check/{name}", share, find_damages):
            self._damaged.add(name)
            return False
        return True

    def run(self, request: ReportRequest, agreement: Future[dict[str, Any]]) -> None:
        """Make one report, on which ranks have agreed; if it is refused, raise DistributorError."""
        agreed = agreement.result()
        name = agreed["name"]
        if agreed["calls upload fn"]:
            name = self._upload_by_function(request, name)
        committed, unlogged = self._channel.agree(
            request.key,
            self._own_part(request, agreed, name),
            lambda parts: self._commit(request, name, agreed["savers"], parts),
            UPLOAD_TIMEOUT_SECONDS,
        )
        self._channel.delete_keys()
        self._unlogged = [*self._unlogged, Report(**unlogged)] if unlogged else []
        if committed is not None:
            self._next_index += 1
        if committed:
            self.latest = committed
            if request.delete_local and request.checkpoint is not None:
                shutil.rmtree(request.checkpoint.path, ignore_errors=True)

    def finish(self, number: int) -> None:
        """Finish after so many reports of this rank, and let no other rank wait for another one."""
        if self._channel.rank == 0:
            self._take_over()
            self._manager.finish()
        self._channel.leave(
            f"report/{number}/come", f"has returned after {counted(number, 'report')}"
        )

    def agree(self, request: ReportRequest) -> dict[str, Any]:
        """Wait for all ranks, which may still be saving, and agree on how to make a report.

        The agreement is for `run`; "in background" says whether all ranks that have saved a
        checkpoint upload it in the background.
        """
        checkpoint = request.checkpoint
        offer = {
            "name": request.name,
            "mode": None if checkpoint is None else request.mode.value,
            "folder": None if checkpoint is None else self._storage.name_of(checkpoint),
            "calls upload fn": request.upload_fn is not None,
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
        self._take_over()
        given = (each["name"] for each in offers if each["name"] is not None)
        name = next(given, f"{PREFIX}{self._next_index:06d}")
        for rank, each in enumerate(offers):
            if each["mode"] == "NO_UPLOAD" and each["folder"] != name:
                raise DistributorError(
                    f"Rank {rank} reports the folder {each['folder']!r} with NO_UPLOAD, but the "
                    f"checkpoint's name is {name!r}. All ranks must report one folder."
                )
        calls_upload_fn = _calls_upload_fn(offers)
        with_modes = zip(self._channel.party, offers, strict=True)
        savers = [member for member, offer in with_modes if offer["mode"]]
        in_place = [each["folder"] == name for each in offers]
        self._free_name(name, keep_files=calls_upload_fn or any(in_place))
        files = _identities_of_local_files(request)
        return {
            "name": name,
            "files of rank 0": dict.fromkeys(files, "") if in_place[0] else files,
            "calls upload fn": calls_upload_fn,
            "savers": savers,
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
        self, request: ReportRequest, agreed: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """Upload this rank's files, and return its part of the report, with an error if any."""
        checkpoint = request.checkpoint
        assignment = assign_among_ranks(
            self._channel, f"{request.key}/files", agreed["files of rank 0"]
        )
        part = {**request.part, "files": None, "other versions": []}
        if checkpoint is None:
            return part
        # From here on, no rank writes to the checkpoint any more except those that copy files.
        others: list[StoredFile] = []
        try:
            if (
                request.mode is CheckpointUploadMode.NO_UPLOAD
                or agreed["calls upload fn"]
                or self._storage.name_of(checkpoint) == name
            ):
                files = self._storage.describe(name, assignment)
            else:
                keep = not request.delete_local
                with checkpoint.as_directory() as folder:
                    files, others = self._storage.upload(folder, name, assignment, keep=keep)
            part["files"] = [asdict(file) for file in files]
            part["other versions"] = [asdict(file) for file in others]
        except Exception as error:
            part["error"] = describe_error(error)
        return part

    def _upload_by_function(self, request: ReportRequest, target: str) -> str:
        """Call the user's function, if this rank has one and a checkpoint.

        Waits until all ranks have done so, and returns the name under which they have uploaded.
        """
        error: Exception | None = None
        name = None if request.checkpoint is None else target
        if request.checkpoint is not None and request.upload_fn is not None:
            try:
                name = self._name_of(request.upload_fn(request.checkpoint, target))
            except Exception as raised:
                error = raised
        key = f"{request.key}/uploaded"
        agreed = self._channel.agree(
            key,
            {"name": name, "error": None if error is None else describe_error(error)},
            lambda offers: self._decide_folder(offers, target),
            UPLOAD_TIMEOUT_SECONDS,
        )
        if "error" in agreed:
            self._channel.await_readers(key)
            if error is not None:
                raise error  # perhaps of the user's function
            raise OtherRankFailed(agreed["error"])
        return str(agreed["name"])

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

    def _decide_folder(self, offers: list[dict[str, Any]], target: str) -> dict[str, Any]:
        """Decide the name of the folder that all ranks have uploaded to. Rank 0 only."""
        for rank, each in enumerate(offers):
            if each["error"] is not None:
                return {"error": failed_upload(rank, self._storage.path, each["error"])}
        names = {each["name"]: rank for rank, each in enumerate(offers) if each["name"] is not None}
        if len(names) > 1:
            found = ", ".join(f"rank {rank} to {name!r}" for name, rank in names.items())
            raise DistributorError(
                f"The ranks have uploaded one checkpoint to several folders: {found}. "
                "checkpoint_upload_fn must upload to the folder that its second argument names, or "
                "to one other folder on all ranks."
            )
        name = next(iter(names), target)
        self._free_name(name, keep_files=True)
        return {"name": name}

    def _commit(
        self,
        request: ReportRequest,
        name: str,
        savers: list[list[int]],
        parts: list[dict[str, Any]],
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Commit what ranks have uploaded, and return its name, if it is any. Rank 0 only.

        It is empty if a rank was lost that had a part of the checkpoint. Also return the report if
        others have to know it, because it is not in the log yet.
        """
        lost = [number for number, since in savers if (number, since) not in self._channel.party]
        takes_over = not self._is_writer
        self._take_over()
        # By the rank that was lost, or here, before the others knew of it.
        may_be = takes_over or self._num_added > request.number
        is_committed = may_be and self._storage.manifest_of(name) is not None
        if lost and not is_committed:
            print(f"distributor: {name} is not stored: rank {lost[0]} was lost.", flush=True)
            parts = [part | {"files": None} for part in parts]
        has_files = any(part["files"] is not None for part in parts)
        checkpoint = name if has_files or is_committed else None
        report = Report(
            number=request.number,
            metrics=parts[0]["metrics"],
            checkpoint=checkpoint,
            world_size=self._channel.size,
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
        try:
            if not is_committed:
                self._manager.add(report, self._next_index, parts)
                self._num_added = request.number + 1
        except DistributorError:
            raise
        except Exception as error:
            raise DistributorError(
                f"The report could not be stored in {self._storage.path}: {describe_error(error)}"
            ) from error
        path = self._storage.checkpoint(name).path if checkpoint else None
        metrics = [part["metrics"] for part in parts]
        preempted, number = parts[0]["preempted"], request.number + 1
        seconds = time.monotonic() - request.began
        worker_context().send(Reported(metrics, path, preempted, number, seconds))
        is_known = worker_context().membership is None or self._manager.is_logged
        return "" if lost and checkpoint is None else checkpoint, None if is_known else vars(report)


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
    if checkpoint is None or request.upload_fn is not None or not is_local(checkpoint.filesystem):
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
