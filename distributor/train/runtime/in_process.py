"""A training function that runs in the process of ``fit``, without storage and other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from distributor.train.storage.checkpoint import Checkpoint, ReportedCheckpoint
from distributor.train.storage.report_log import json_metrics

_TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class InProcessRun:
    """Remembers the last report, in place of a `Reporter` and `Collectives`.

    The checkpoint that was reported last stays in its place.
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


def needs_process_group() -> bool:
    """Return whether torchrun has started this process among others, which have no group yet."""
    if not _was_started_by_torchrun():
        return False
    import torch.distributed as dist

    return not dist.is_initialized()


def _was_started_by_torchrun() -> bool:
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)
