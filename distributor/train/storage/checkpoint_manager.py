"""Rank 0's part: it tracks reports, commits checkpoints and removes old ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from distributor.core.checkpoint_config import CheckpointSettings
from distributor.errors import DistributorError
from distributor.train.storage.checkpoint_store import NUMBERED, RECORD, Manifest, Storage, Stored
from distributor.train.storage.report_log import FILE, Report, from_lines, to_lines
from distributor.train.storage.retention import check_score, superfluous

RECORD_SECONDS = 10.0
"""Seconds after which reports without a checkpoint are recorded."""


class History:
    """What a training has reported, and what it keeps of that.

    Parameters
    ----------
    storage : Storage
        Where it is kept.
    checkpoint_settings : CheckpointSettings
        How much is.
    """

    def __init__(self, storage: Storage, checkpoint_settings: CheckpointSettings) -> None:
        self._storage = storage
        self._checkpoint_settings = checkpoint_settings
        self._reports: list[Report] = []
        self._recorded = 0
        self._told = False
        self._recorded_at = time.monotonic()

    def go_on_from(self, checkpoint: str | None) -> int:
        """Forget what was reported after a checkpoint; give how many reports are left."""
        if checkpoint is not None:
            text = self._storage.read(f"{checkpoint}/{RECORD}")
            self._reports = from_lines(text or b"")
        there = from_lines(self._storage.read(FILE) or b"")[: len(self._reports)]
        # Whoever was killed may have been about to; of one that has ended there may be more.
        self._recorded = len(there) if there == self._reports else 0
        return len(self._reports)

    def take(self, report: Report, index: int, told: Sequence[dict[str, Any]]) -> None:
        """Take what all ranks report together.

        Parameters
        ----------
        report : Report
            Rank 0's, with the name of the checkpoint, where some rank has one.
        index : int
            The checkpoint's, if there is one.
        told : sequence of dict
            What each rank told of its part.

        Raises
        ------
        DistributorError
            Where the ranks do not agree, or a rank could not do its part.
        """
        if error := _disagreement(told):
            raise DistributorError(error)
        given = [files for each in told if (files := each["files"]) is not None]
        if not given:
            self._reports.append(report)
        elif not any(given):
            raise DistributorError(
                "The checkpoint is empty: no rank has saved anything in the folder that it "
                "reports. Report without a checkpoint where there is nothing to keep."
            )
        else:
            assert report.checkpoint is not None
            if NUMBERED.fullmatch(report.checkpoint):
                check_score(report.metrics, self._checkpoint_settings)
            self._reports.append(report)
            self._commit(report, index, _joined(given), told[0]["positions"])
        if given or time.monotonic() > self._recorded_at + RECORD_SECONDS:
            self.record()

    def record(self) -> None:
        """Bring the run's record up to date; where it cannot be, checkpoints still have theirs."""
        if self._recorded == len(self._reports):
            return
        try:
            self._storage.write(FILE, to_lines(self._reports))
        except OSError as error:  # mounted object stores write no file twice
            if not self._told:
                self._told = True
                print(f"distributor: {FILE} cannot be kept up to date: {error}.", flush=True)
        self._recorded, self._recorded_at = len(self._reports), time.monotonic()

    def _commit(
        self, report: Report, index: int, files: tuple[Stored, ...], positions: dict[str, Any]
    ) -> None:
        """Make the checkpoint exist; only then are others superfluous."""
        target = report.checkpoint
        assert target is not None
        record = self._storage.write(f"{target}/{RECORD}", to_lines(self._reports))
        manifest = Manifest(
            index=index,
            metrics=report.metrics,
            world_size=report.world_size,
            positions=positions,
            files=(*files, record),
        )
        self._storage.commit(target, manifest)
        for old in self._superfluous(target):
            try:
                self._storage.remove(old)
            except Exception as error:  # what has been committed is, all the same
                print(f"distributor: {old} could not be removed: {error}.", flush=True)

    def _superfluous(self, latest: str) -> list[str]:
        begun = self._storage.leftovers(latest)
        if self._checkpoint_settings.num_to_keep is None:
            return begun
        return [*superfluous(self._storage.committed(), self._checkpoint_settings), *begun]


def _disagreement(told: Sequence[dict[str, Any]]) -> str | None:
    """Say what keeps the ranks' reports from being one."""
    for rank, each in enumerate(told):
        if "error" in each:
            return f"Rank {rank} could not bring its checkpoint to storage: {each['error']}"
    ranked = list(enumerate(told))
    names = {each["name"]: rank for rank, each in reversed(ranked) if each["name"] is not None}
    if len(names) > 1:
        listed = ", ".join(f"{name!r} on rank {rank}" for name, rank in names.items())
        return f"Ranks report a checkpoint under different names: {listed}."
    return None


def _joined(given: list[list[dict[str, Any]]]) -> tuple[Stored, ...]:
    """Put together what ranks have written; what several wrote alike is one file."""
    files: dict[str, Stored] = {}
    for file in (Stored(**file) for files in given for file in files):
        if files.setdefault(file.name, file) != file:
            raise DistributorError(
                f"Several ranks report a file {file.name}, and not the same. Name what each rank "
                "saves after its rank, or let one rank report it."
            )
    return tuple(files.values())
