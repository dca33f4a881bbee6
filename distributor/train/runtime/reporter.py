"""A rank's reports, each made together with all other ranks or not at all."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from distributor.core.rank_variables import CheckpointSettings, check_name
from distributor.errors import DistributorError
from distributor.filesystems import is_local
from distributor.rank.context import worker_context
from distributor.rank.step_clock import CHECKPOINT, WAITED
from distributor.rank.store_channel import StoreChannel
from distributor.train.runtime.report_round import ReportRequest, ReportRounds, UploadFn
from distributor.train.storage.checkpoint import (
    Checkpoint,
    CheckpointUploadMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
)
from distributor.train.storage.checkpoint_manager import json_metrics, ranked
from distributor.train.storage.checkpoint_store import Storage

VALIDATION_SECONDS = 24 * 3600.0
"""Seconds that a rank waits for validations if it sets no limit."""
LATE_WARNING_SECONDS = 60.0
"""Seconds after which a rank prints which validations it is waiting for."""
MAX_PENDING = 8  # reports in the background; more would fill the disk if uploads are slow
POLL_SECONDS = 0.5
"""Seconds between two looks at the results of validations, which the driver writes."""
ATTENTION_SECONDS = 0.01
"""Seconds until a rank that waits for a report learns that a member is lost, at most."""


class Reporter:
    """Reports for this rank, one report at a time, on a thread that alone uses the store.

    A `filesystem` replaces the one that the storage path names. `resume_from` is the checkpoint to
    start from as long as the run has none of its own. `was_preempted` returns whether the program
    knows by now that the run is about to lose a process.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        filesystem: Any,
        resume_from: Checkpoint | None,
        was_preempted: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self.custom_filesystem = filesystem is not None
        self.storage = Storage(settings.storage_path, settings.name, filesystem)
        self._resume_from = resume_from
        self._was_preempted = was_preempted
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reports")
        self._thread_id = self._thread.submit(threading.get_ident).result()
        self._pending: list[Future[None]] = []
        self._loaders: list[weakref.WeakMethod[Callable[[], Any]]] = []
        self._named_loaders: dict[str, weakref.WeakMethod[Callable[[], Any]]] = {}
        self._members = members = worker_context().membership
        joins = members is not None and members.joins
        self._rounds = self._thread.submit(
            lambda: ReportRounds(
                StoreChannel.connect(), self.storage, settings, resume_from, joins=joins
            )
        ).result()
        if members is not None:
            members.follow(self, undo=False)
        clock = worker_context().clock
        self._wait_for_ranks = clock.timing(WAITED)(self._wait)
        self._wait_for_report = clock.timing(CHECKPOINT)(self._wait)
        self._number = worker_context().completed_steps = self._rounds.num_reports
        worker_context().register_loader = self.register_loader
        worker_context().add_final_step(self.finish)

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool,
        upload_fn: UploadFn | None,
        validation: Mapping[str, Any] | None,
    ) -> None:
        """Report, as `distributor.train.report` documents.

        `validation` has the arguments of a requested one's ``ValidationTaskConfig``, if any.
        """
        self._check_thread()
        if validation is not None and checkpoint is None:
            raise ValueError("validation needs a checkpoint: this rank reports None.")
        if validation is not None and not self._settings.validates:
            raise ValueError(
                "report requests a validation, but the run has no function for it: pass "
                "validation_config=ValidationConfig(fn) to TorchTrainer."
            )
        if name is not None:
            check_name("checkpoint_dir_name", name)
        if mode is CheckpointUploadMode.NO_UPLOAD and checkpoint is not None:
            name = self.storage.name_of(checkpoint)
            if name is None:
                raise ValueError(
                    "With NO_UPLOAD, a checkpoint must already be a folder in "
                    f"{self.storage.path}, but it is at {checkpoint.path}."
                )
        if checkpoint is None or mode is CheckpointUploadMode.NO_UPLOAD:
            delete_local, upload_fn = False, None
        elif self.storage.is_inside(checkpoint):
            raise ValueError(
                f"The run's own folder {self.storage.path} is inside the reported checkpoint "
                f"{checkpoint.path}, which would be copied into itself, or deleted after the "
                "upload. Save the checkpoint in a folder of its own."
            )
        elif not is_local(checkpoint.filesystem) or self.storage.contains(checkpoint):
            delete_local = False
        self._wait_for_pending(MAX_PENDING - 1)
        request = ReportRequest(
            number=self._number,
            checkpoint=checkpoint,
            name=name,
            mode=mode,
            delete_local=delete_local,
            upload_fn=upload_fn,
            part={
                # A copy: the program may change its own. Errors are raised before others wait.
                "metrics": json_metrics(metrics),
                "positions": self._loader_positions(),
                "preempted": self._was_preempted(),
                "validation": validation,
            },
        )
        agreement = self._thread.submit(self._rounds.agree, request)
        self._pending.append(self._thread.submit(self._rounds.run, request, agreement))
        self._number += 1
        if not self._is_in_background(request, agreement):
            self._wait_for_pending()
        worker_context().completed_steps = self._number

    def finish(self) -> None:
        """Wait for the reports in the background, and raise the first error among them."""
        self._wait_for_pending()
        self._thread.submit(self._rounds.finish, self._number).result()

    # What a process takes over that joins in the place of a lost rank

    def save(self) -> dict[str, Any]:
        return {"number": self._number, "rounds": self._rounds.save()}

    def load(self, saved: Mapping[str, Any]) -> None:
        self._number = worker_context().completed_steps = saved["number"]
        self._rounds.load(saved["rounds"])

    def on_members(self, rank: int, size: int) -> None:
        """Make reports with the new members, once those with the former ones have ended."""
        assert self._members is not None
        party = self._members.party
        self._thread.submit(lambda: self._rounds.exchange_over(StoreChannel.connect(party=party)))

    def latest(self) -> Checkpoint | None:
        """Return the latest checkpoint that exists."""
        latest = self._rounds.latest
        return self._resume_from if latest is None else self.storage.checkpoint(latest)

    def all(self, validated: bool, timeout: float | None) -> list[ReportedCheckpoint]:
        """Wait for this rank's reports, and perhaps validations; list the checkpoints that exist.

        After `timeout` seconds, those that exist then are listed. The best, or the latest, is last.
        """
        self._check_thread()
        deadline = None if timeout is None else time.monotonic() + timeout
        for pending in self._pending:
            self._wait(pending, math.inf if deadline is None else deadline)
        if validated and self._settings.validates:
            _wait_for_validations(self.storage, deadline)
        return [
            ReportedCheckpoint(
                self.storage.checkpoint(name),
                dict(manifest.metrics),
                ReportedCheckpointStatus[manifest.status],
            )
            for name, manifest in ranked(self.storage.committed(), self._settings)
        ]

    def register_loader(self, position: Callable[[], Any], name: str | None = None) -> Any:
        """Save the position of a data loader, which its bound method returns, with each checkpoint.

        Loaders without a name are numbered. Only a weak reference to the loader is kept. Returns
        its position in the checkpoint from which the training resumes; None if there is none.
        """
        if name is not None:
            self._named_loaders[name] = weakref.WeakMethod(position)
            return self._rounds.positions.get(name)
        self._loaders.append(weakref.WeakMethod(position))
        return self._rounds.positions.get(str(len(self._loaders) - 1))

    def _loader_positions(self) -> dict[str, Any]:
        """Return the positions of the loaders that still exist, in the order of registration.

        Loaders of the checkpoint that have not been registered again yet keep their position.
        """
        existing = [position for loader in self._loaders if (position := loader()) is not None]
        current = {str(number): position() for number, position in enumerate(existing)}
        for name, loader in self._named_loaders.items():
            if (position := loader()) is not None:
                current[name] = position()
        registered = {*map(str, range(len(self._loaders))), *self._named_loaders}
        return {n: at for n, at in self._rounds.positions.items() if n not in registered} | current

    def _check_thread(self) -> None:
        if threading.get_ident() == self._thread_id:
            raise RuntimeError(
                "checkpoint_upload_fn is a part of a report, and cannot make or await one."
            )

    def _is_in_background(self, request: ReportRequest, agreement: Future[dict[str, Any]]) -> bool:
        """Return whether the program continues before the checkpoint is in storage."""
        if request.mode is CheckpointUploadMode.ASYNC:
            return True
        self._wait_for_ranks(agreement)
        # A rank without a checkpoint need not wait if the others do not.
        if request.checkpoint is not None or agreement.exception() is not None:
            return False  # the error is raised by the report itself
        return bool(agreement.result()["in background"])

    def _wait_for_pending(self, most: int = 0) -> None:
        """Wait until no more are pending than that; an error of a report that is done is raised."""
        while self._pending and (self._pending[0].done() or len(self._pending) > most):
            pending = self._pending.pop(0)
            self._wait_for_report(pending)
            pending.result()

    def _wait(self, exchange: Future[Any], deadline: float = math.inf) -> None:
        if self._members is None:
            wait([exchange], None if deadline == math.inf else deadline - time.monotonic())
            return
        while wait([exchange], ATTENTION_SECONDS).not_done and time.monotonic() < deadline:
            self._members.attend()


def _wait_for_validations(storage: Storage, deadline: float | None) -> None:
    """Wait until the checkpoints that exist now have been validated, or for the deadline."""
    start = time.monotonic()
    end = start + VALIDATION_SECONDS if deadline is None else deadline
    warn_at = start + LATE_WARNING_SECONDS
    pending = [name for name, manifest in storage.committed() if manifest.is_pending]

    def waits() -> str:
        return (
            f"After {time.monotonic() - start:.0f} s, get_all_reported_checkpoints still waits for "
            f"the validation of {', '.join(pending)}"
        )

    while pending and (left := end - time.monotonic()) > 0:
        time.sleep(min(POLL_SECONDS, left))
        manifests = {name: storage.manifest_of(name) for name in pending}
        pending = [name for name, found in manifests.items() if found and found.is_pending]
        if pending and time.monotonic() > warn_at:
            warn_at = end
            print(f"distributor: {waits()}.", flush=True)
    if pending and deadline is None:
        raise DistributorError(f"{waits()}, and no longer.")
