"""A rank's reports, each made together with all other ranks or not at all."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings, check_name
from distributor.rank.context import worker_context
from distributor.train.checkpoint import Checkpoint, CheckpointUploadMode, ReportedCheckpoint
from distributor.train.runtime.json_metrics import json_metrics
from distributor.train.runtime.report_request import ReportRequest, UploadFn
from distributor.train.runtime.report_round import ReportRounds
from distributor.train.runtime.reported import reported_checkpoints, wait_for_validations
from distributor.train.runtime.resume import find_resume_point
from distributor.train.runtime.store_channel import StoreChannel
from distributor.train.storage.checkpoint_manager import CheckpointManager
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.validation.config import ValidationTaskConfig


class Reporter:
    """Reports for this rank, one report at a time, on a thread that alone uses the store.

    Parameters
    ----------
    settings : CheckpointSettings
        The run's folder in storage, and which checkpoints are kept.
    filesystem : FileSystem, optional
        The file system of the storage path; by default the one that the path names.
    resume_from : Checkpoint, optional
        The checkpoint to start from as long as the run has none of its own.
    was_preempted : callable, optional
        Returns whether the program knows by now that the run is about to lose a process.

    Attributes
    ----------
    storage : Storage
        The run's folder.
    custom_filesystem : bool
        Whether the user has passed `filesystem`.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        filesystem: Any = None,
        resume_from: Checkpoint | None = None,
        was_preempted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self.custom_filesystem = filesystem is not None
        self.storage = Storage(settings.storage_path, settings.name, filesystem)
        self._manager = CheckpointManager(self.storage, settings)
        self._resume_from = resume_from
        self._was_preempted = was_preempted
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reports")
        self._pending: list[Future[None]] = []
        self._loaders: list[weakref.WeakMethod[Callable[[], Any]]] = []
        self._named_loaders: dict[str, weakref.WeakMethod[Callable[[], Any]]] = {}
        self._thread_id: int
        self._number: int
        self._positions: Mapping[str, Any]
        self._rounds: ReportRounds
        self._thread.submit(self._start).result()
        worker_context().completed_steps = self._number
        worker_context().register_loader = self.register_loader
        worker_context().add_final_step(self.finish)

    def _start(self) -> None:
        self._thread_id = threading.get_ident()
        channel = StoreChannel.connect()
        start = find_resume_point(channel, self.storage, self._manager, self._resume_from)
        self._number, self._positions = start.num_reports, start.positions
        self._rounds = ReportRounds(channel, self.storage, self._manager, start)

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool,
        upload_fn: UploadFn | None = None,
        validation: bool | ValidationTaskConfig | None = False,
    ) -> None:
        """Report, as `distributor.train.report` documents."""
        self._check_thread()
        requested = self._requested_validation(validation, checkpoint)
        if name is not None:
            check_name("checkpoint_dir_name", name)
        if mode is CheckpointUploadMode.NO_UPLOAD and checkpoint is not None:
            name = self._name_in_storage(checkpoint)
        elif checkpoint is not None and self.storage.is_inside(checkpoint):
            raise ValueError(
                f"The run's own folder {self.storage.path} is inside the reported checkpoint "
                f"{checkpoint.path}, which would be copied into itself, or deleted after the "
                "upload. Save the checkpoint in a folder of its own."
            )
        self._raise_failures()
        request = ReportRequest(
            number=self._number,
            # A copy: the program may change its own. Errors are raised before other ranks wait.
            metrics=json_metrics(metrics),
            checkpoint=checkpoint,
            name=name,
            mode=mode,
            delete_local=delete_local,
            upload_fn=upload_fn,
            validation=requested,
            positions=self._loader_positions(),
            preempted=self._was_preempted(),
        )
        self._pending.append(self._thread.submit(self._rounds.run, request))
        self._number += 1
        if not self._continues_before(request):
            self._wait_for_pending()
        worker_context().completed_steps = self._number

    def _requested_validation(
        self, validation: bool | ValidationTaskConfig | None, checkpoint: Checkpoint | None
    ) -> dict[str, Any] | None:
        """Return a requested validation's own arguments, or none for the default ones."""
        if validation is None or validation is False:
            return None
        if checkpoint is None:
            raise ValueError("validation needs a checkpoint: this rank reports None.")
        if not self._settings.validates:
            raise ValueError(
                "report requests a validation, but the run has no function for it: pass "
                "validation_config=ValidationConfig(fn) to TorchTrainer."
            )
        if validation is True:
            return {}
        validation.check()
        return asdict(validation)

    def _continues_before(self, request: ReportRequest) -> bool:
        """Return whether the program continues before the checkpoint is in storage.

        A rank without a checkpoint need not wait if the others do not.
        """
        if request.mode is CheckpointUploadMode.ASYNC:
            return True
        if request.checkpoint is not None or request.in_background.exception() is not None:
            return False  # the error is raised by the report itself
        return request.in_background.result()

    def finish(self) -> None:
        """Wait for the reports in the background, and raise the first error among them."""
        self._wait_for_pending()
        self._thread.submit(self._rounds.finish, self._number).result()

    def latest(self) -> Checkpoint | None:
        """Return the latest checkpoint that exists."""
        latest = self._rounds.latest
        return self._resume_from if latest is None else self.storage.checkpoint(latest)

    def all(self, validated: bool, timeout: float | None = None) -> list[ReportedCheckpoint]:
        """Wait for the reports of this rank, and list the checkpoints that exist.

        Parameters
        ----------
        validated : bool
            Whether to wait for validations, too.
        timeout : float, optional
            Seconds after which the checkpoints that exist then are listed; by default no limit.
        """
        self._check_thread()
        deadline = None if timeout is None else time.monotonic() + timeout
        wait(self._pending, timeout)
        if validated and self._settings.validates:
            wait_for_validations(self.storage, deadline)
        return reported_checkpoints(self.storage, self._settings)

    def register_loader(self, position: Callable[[], Any], name: str | None = None) -> Any:
        """Save a data loader's position with each checkpoint.

        Parameters
        ----------
        position : bound method
            Returns the loader's position. Only a weak reference to the loader is kept.
        name : str, optional
            A name that no other loader has; by default loaders are numbered.

        Returns
        -------
        object
            Its position in the checkpoint from which the training resumes; None if there is none.
        """
        if name is not None:
            self._named_loaders[name] = weakref.WeakMethod(position)
            return self._positions.get(name)
        self._loaders.append(weakref.WeakMethod(position))
        return self._positions.get(str(len(self._loaders) - 1))

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
        return {n: at for n, at in self._positions.items() if n not in registered} | current

    def _name_in_storage(self, checkpoint: Checkpoint) -> str:
        """Return the name of a checkpoint that must already be in the run's folder."""
        if (name := self.storage.name_of(checkpoint)) is None:
            raise ValueError(
                f"With NO_UPLOAD, a checkpoint must already be a folder in {self.storage.path}, "
                f"but it is at {checkpoint.path}."
            )
        return name

    def _check_thread(self) -> None:
        """Check that this is not called by the user's function that uploads a checkpoint."""
        if threading.get_ident() == self._thread_id:
            raise RuntimeError(
                "checkpoint_upload_fn is a part of a report, and cannot make or await one."
            )

    def _raise_failures(self) -> None:
        """Raise the error of a report in the background that has failed."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def _wait_for_pending(self) -> None:
        while self._pending:
            self._pending.pop(0).result()
