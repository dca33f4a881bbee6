"""The training state of this process, if it is a rank: one object, which owns all of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.filesystems import UnknownScheme
from distributor.rank.context import worker_context
from distributor.train.runtime.collectives import Collectives
from distributor.train.runtime.preemption import NoticeTracker, agree
from distributor.train.runtime.reporter import Reporter
from distributor.train.storage.checkpoint import Checkpoint, ReportedCheckpoint
from distributor.train.storage.report_log import json_metrics

if TYPE_CHECKING:
    from distributor.data.shard import DatasetShard

_TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class InProcessRun:
    """Remembers the last report of a training function that runs in the process of ``fit``.

    Takes the place of a `Reporter` and `Collectives`, without storage and other processes.
    """

    custom_filesystem = False

    def __init__(self, name: str, resume_from: Checkpoint | None) -> None:
        self.name = name
        self.metrics: dict[str, Any] | None = None
        self.checkpoint: Checkpoint | None = None
        self._resume_from = resume_from

    @property
    def storage(self) -> NoReturn:
        raise NotImplementedError("With num_workers=0 a run has no storage.")

    def report(
        self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None, *options: object
    ) -> None:
        """Remember a report. Nothing is uploaded, deleted or validated."""
        validation = options[-1]
        if validation is not None and checkpoint is None:
            raise ValueError("validation needs a checkpoint, but None is reported.")
        self.metrics = json_metrics(metrics)
        self.checkpoint = checkpoint or self.checkpoint

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that was reported last, or the one to start from."""
        return self.checkpoint or self._resume_from

    def all(self, validated: bool, timeout: float | None) -> list[ReportedCheckpoint]:
        return []

    def register_loader(self, position: Callable[[], Any]) -> None:
        """Do nothing: no checkpoint has the position of a data loader."""

    def barrier(self) -> None:
        """Wait for the other processes that torchrun has started, if it has."""
        self.broadcast(None)

    def broadcast(self, data: Any) -> Any:
        if not _was_started_by_torchrun():
            return data
        import torch.distributed as dist

        objects = [data]
        dist.broadcast_object_list(objects)
        dist.barrier()
        return objects[0]


class RankSession:
    """The reporter, the preemption notices and the trainer's datasets of this process.

    The parts are created when they are first needed, and live until the process ends: a rank is one
    process of one attempt, so that nothing is ever reset.
    """

    def __init__(self) -> None:
        self.dataset_shards: Mapping[str, DatasetShard] = {}
        self._reporter: Reporter | None = None
        self._notices: dict[str, NoticeTracker] = {}
        self._collectives = Collectives()
        self._in_process: InProcessRun | None = None

    @contextlib.contextmanager
    def run_in_process(self, name: str, resume_from: Checkpoint | None) -> Iterator[InProcessRun]:
        """Make this process the only rank of a run, for the duration of the context."""
        outer, self._in_process = self._in_process, InProcessRun(name, resume_from)
        try:
            yield self._in_process
        finally:
            self._in_process = outer

    @property
    def run_name(self) -> str:
        """The name of the run; its id if it has none, and empty outside a run."""
        if self._in_process is not None:
            return self._in_process.name
        settings = CheckpointSettings.from_env()
        return settings.name if settings else os.environ.get("TORCHELASTIC_RUN_ID", "")

    @property
    def collectives(self) -> Collectives | InProcessRun:
        self.require_rank("The functions of distributor.train.collective")
        return self._in_process or self._collectives

    @property
    def reporter(self) -> Reporter | InProcessRun:
        """The reporter; started first if necessary."""
        return self._in_process or self._reporter or self.start_reporter()

    def start_reporter(
        self, filesystem: Any = None, resume_from: Checkpoint | None = None
    ) -> Reporter:
        """Start this rank's reporter, together with all other ranks; see `Reporter`.

        Raises RuntimeError if this process is not a rank of a run, or the run has no storage, and
        DistributorError if the ranks do not share the storage, or one of them does not call this.
        """
        self.require_rank("report and get_checkpoint")
        settings = CheckpointSettings.from_env()
        if settings is None:
            raise RuntimeError(
                "This run has no storage: pass a storage_path to TorchDistributor, or a "
                "RunConfig(storage_path=...) to TorchTrainer."
            )
        self._reporter = Reporter(settings, filesystem, resume_from, self.was_preempted)
        return self._reporter

    def is_preempted(self) -> bool:
        """Return, at the same call in all ranks, whether the run is about to lose a process."""
        return worker_context().is_rank and self._notices_of("is_preempted").is_due()

    def preempted_ranks(self) -> dict[str, list[int]] | None:
        """Return the hosts that will lose a process, from the same call on in all ranks."""
        self.require_rank("get_preemption_info")
        if not worker_context().is_rank:  # a subprocess of a rank, or the process of `fit`
            return None
        return self._notices_of("get_preemption_info").preempted_ranks()

    def _notices_of(self, function: str) -> NoticeTracker:
        """Return the notices of a function, whose calls are counted separately."""
        if function not in self._notices:
            tracker = self._notices[function] = NoticeTracker(partial(agree, function))
            worker_context().preemption_notices.subscribe(tracker.receive)
        return self._notices[function]

    def was_preempted(self) -> bool:
        return any(notices.was_due for notices in self._notices.values())

    def require_rank(self, what: str) -> None:
        """Raise RuntimeError if this process is not a rank of a run; says what cannot be called."""
        if self._in_process is None and not _is_rank():
            raise RuntimeError(
                f"{what} can only be called by the ranks of a run: call them in the function that "
                "TorchTrainer or TorchDistributor runs."
            )


session = RankSession()
"""The session of this process."""


def has_storage() -> bool:
    """Return whether this process is a rank of a run with storage."""
    return _is_rank() and CheckpointSettings.from_env() is not None


def check_storage() -> None:
    """Start the reporter before the rank's program, which may run for days before it reports."""
    with contextlib.suppress(UnknownScheme):  # the program may register the scheme
        session.start_reporter()


def _is_rank() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def needs_process_group() -> bool:
    """Return whether torchrun has started this process among others, which have no group yet."""
    if not _was_started_by_torchrun():
        return False
    import torch.distributed as dist

    return not dist.is_initialized()


def _was_started_by_torchrun() -> bool:
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)
