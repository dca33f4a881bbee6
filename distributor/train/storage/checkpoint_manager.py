"""Rank 0's part of a report: it appends to the log, commits checkpoints and removes old ones."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributor.core.rank_variables import CheckpointSettings
from distributor.core.text import counted
from distributor.errors import DistributorError
from distributor.filesystems import describe_error
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import (
    CHECKPOINT_LOG,
    COMMITTED,
    PENDING,
    RUN_LOG,
    Manifest,
    StoredFile,
)
from distributor.train.storage.report_log import Report, ReportLog, read_log


def remove_surplus(storage: Storage, settings: CheckpointSettings) -> list[str]:
    """Remove the checkpoints that are not kept, and describe those that could not be removed."""
    if settings.num_to_keep is None:
        return []  # the manifests need not be read
    return remove_all(storage, select_removable(storage.committed(), settings))


def remove_all(storage: Storage, names: Iterable[str]) -> list[str]:
    """Remove checkpoints, and describe those that could not be removed."""
    failures = []
    for name in names:
        try:
            storage.remove(name)
        except Exception as error:
            failures.append(f"{name} could not be removed: {describe_error(error)}.")
    return failures


def select_removable(
    committed: Sequence[tuple[str, Manifest]], settings: CheckpointSettings
) -> list[str]:
    """Return the names of those checkpoints, the oldest first, that are not kept."""
    # As in Ray Train, the latest and those that are yet to be validated are kept in addition to the
    # `num_to_keep` best ones, and checkpoints that the user has named count too.
    best = _best(committed, settings)
    pending = [pair for pair in committed if pair[1].is_pending]
    kept = {name for name, _ in [*best, *committed[-1:], *pending]}
    return [name for name, _ in committed if name not in kept]


def ranked(
    committed: Sequence[tuple[str, Manifest]], settings: CheckpointSettings
) -> list[tuple[str, Manifest]]:
    """Return checkpoints from the worst to the best; by age if they are not ranked by a metric."""
    return sorted(committed, key=lambda pair: _rank_key(pair[1], settings))


def best_of(committed: Sequence[tuple[str, Manifest]]) -> list[tuple[str, Manifest]]:
    """Return the checkpoints that are kept for their rank, from the worst to the best.

    The latest is missing if it is kept for its age alone. Its manifest says how they are ranked.
    """
    if not committed:
        return []
    settings = CheckpointSettings(storage_path="", name="", **committed[-1][1].retention)
    return _best(committed, settings)


def _best(
    committed: Sequence[tuple[str, Manifest]], settings: CheckpointSettings
) -> list[tuple[str, Manifest]]:
    best = ranked(committed, settings)
    return best if settings.num_to_keep is None else best[-settings.num_to_keep :]


def score_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric by its name, or by a path such as ``val/loss``; None if it is no number."""
    found: Any = metrics.get(name)
    if found is None:
        found = metrics
        for key in name.split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, (int, float)) and not math.isnan(found) else None


def _rank_key(manifest: Manifest, settings: CheckpointSettings) -> tuple[float, int]:
    score = score_of(manifest.metrics, settings.score_attribute or "")
    if score is None:
        return -math.inf, manifest.index
    return (score if settings.score_order == "max" else -score), manifest.index


LOG_INTERVAL = 10.0
"""Seconds after which reports without a checkpoint are written to the run's log."""


class CheckpointManager:
    """The reports of a training run, and the checkpoints that it keeps."""

    def __init__(self, storage: Storage, settings: CheckpointSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._log = ReportLog(storage)
        self._is_logged = True
        self._logged_at = time.monotonic()
        self._warned: set[str] = set()  # kinds of warnings
        self._unfinished: list[str] = []

    def resume_from(self, checkpoint: str | None, unfinished: Sequence[str] = ()) -> int:
        """Forget the reports after a checkpoint, and return the number of those up to it.

        `unfinished` are checkpoints of earlier attempts, removed after the next commit.
        """
        self._unfinished = [*unfinished]
        if checkpoint is None:
            return 0
        text = self._storage.read(f"{checkpoint}/{CHECKPOINT_LOG}") or b""
        count = self._log.restore(text)
        # An attempt that was killed may not have logged its last reports. The log of a run that has
        # ended may have more of them than the checkpoint, and stays as it is.
        logged = self._storage.read(RUN_LOG) or b""
        self._is_logged = logged.startswith(text) or (
            read_log(self._storage, logged)[:count] == read_log(self._storage, text)
        )
        return count

    def add(self, report: Report, index: int, parts: Sequence[dict[str, Any]]) -> None:
        """Add a report of all ranks, in rank order, and commit its checkpoint if it has one.

        `index` is the checkpoint's number. Raises DistributorError if the parts do not agree, or a
        rank could not upload its files.
        """
        for rank, part in enumerate(parts):
            if "error" in part:
                raise DistributorError(failed_upload(rank, self._storage.path, part["error"]))
        files = [part["files"] for part in parts if part["files"] is not None]
        if files:
            check_in_step([part["positions"] for part in parts])
        self._log.add(report)
        self._is_logged = False
        if files:
            stored = _merge_files(files)
            if not stored:
                self._warn_once("empty", f"{report.checkpoint} is empty: no rank saved a file.")
            self._warn_of_versions(stored, parts)
            if requested_validation(parts) is None:  # its metrics are to come
                self._warn_without_score(report)
            self._commit(report, index, stored, parts)
        if files or time.monotonic() > self._logged_at + LOG_INTERVAL:
            self.write_log()

    def _warn_of_versions(
        self, stored: Sequence[StoredFile], parts: Sequence[dict[str, Any]]
    ) -> None:
        kept = set(stored)
        for rank, part in enumerate(parts):
            for file in (StoredFile(**fields) for fields in part["other versions"]):
                if file not in kept:
                    self._warn_once(
                        "versions",
                        f"Several ranks report a file {file.name} with different content; that of "
                        f"rank {rank} is not in the checkpoint. Include the rank in the name of a "
                        "file that each rank needs.",
                    )

    def _warn_without_score(self, report: Report) -> None:
        name = self._settings.score_attribute
        if name is not None and score_of(report.metrics, name) is None:
            self._warn_once(
                "score",
                f"checkpoint_score_attribute is {name!r}, but the metrics that were reported with "
                f"{report.checkpoint} contain no such number, so it ranks last: "
                f"{dict(report.metrics)}.",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"distributor: {message}", flush=True)

    def finish(self) -> None:
        """Write the run's log, and remove what an attempt that was killed left to be removed."""
        self.write_log()
        self._remove_others([])

    def write_log(self) -> None:
        """Update the run's log; if that fails, each checkpoint still has its own."""
        if self._is_logged:
            return
        try:
            self._storage.write(RUN_LOG, self._log.content())
        except OSError as error:  # mounted object stores cannot overwrite a file
            self._warn_once("log", f"{RUN_LOG} cannot be updated: {describe_error(error)}.")
        self._is_logged, self._logged_at = True, time.monotonic()

    def _commit(
        self,
        report: Report,
        index: int,
        files: tuple[StoredFile, ...],
        parts: Sequence[dict[str, Any]],
    ) -> None:
        """Commit a checkpoint, and only then remove others."""
        name = report.checkpoint
        assert name is not None
        log = self._storage.write(f"{name}/{CHECKPOINT_LOG}", self._log.content())
        validation = requested_validation(parts)
        manifest = Manifest(
            index=index,
            metrics=report.metrics,
            world_size=report.world_size,
            positions=parts[0]["positions"],
            files=(*files, log),
            validation=validation,
            status=COMMITTED if validation is None else PENDING,
            retention=self._settings.retention,
        )
        self._storage.commit(name, manifest)
        unfinished = [each for each in self._unfinished if each != name]
        self._unfinished = []
        self._remove_others(unfinished)

    def _remove_others(self, unfinished: Sequence[str]) -> None:
        failures = [
            *remove_surplus(self._storage, self._settings),
            *remove_all(self._storage, unfinished),
        ]
        for failure in failures:  # what is committed stays so
            print(f"distributor: {failure}", flush=True)


def requested_validation(parts: Sequence[dict[str, Any]]) -> Any:
    """Return the validation that the first rank with a checkpoint requests; None for none."""
    return next((part["validation"] for part in parts if part["files"] is not None), None)


def failed_upload(rank: int, folder: str, why: str) -> str:
    return f"Rank {rank} could not upload its checkpoint to {folder}: {why}"


def _merge_files(parts: list[list[dict[str, Any]]]) -> tuple[StoredFile, ...]:
    """Merge the files of all ranks; several ranks may report the same file."""
    files: dict[str, StoredFile] = {}
    for file in (StoredFile(**fields) for part in parts for fields in part):
        if files.setdefault(file.name, file) != file:
            raise DistributorError(
                f"Several ranks report a file {file.name} with different content. Include the "
                "rank in the name of each file, or let one rank report it."
            )
    return tuple(files.values())


def check_in_step(positions: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks, in this order, have read equally much of each dataset that they share.

    A checkpoint has one position for all of them: with any other, a restart would skip rows.
    Different epochs are no error if each rank has read whole ones.
    """
    shards = {name for each in positions for name, at in each.items() if "history" in at}
    for name in sorted(shards):
        found = [each.get(name) for each in positions]
        other = next((rank for rank, at in enumerate(found) if at != found[0]), None)
        if other is not None and any(at and at["history"] for at in found):
            raise DistributorError(
                f"The ranks have not read {name} in step: rank 0 {_describe(found[0])}, but rank "
                f"{other} {_describe(found[other])}. A checkpoint has one position for all ranks, "
                "so they must read their shards together, with the same batch size and as many "
                "passes. What only one rank reads can be a dataset of its own."
            )


def _describe(position: Mapping[str, Any] | None) -> str:
    if position is None:
        return "has not read it"
    rows = position["history"][-1][1] if position["history"] else 0
    return f"has read {counted(rows, 'row')} of its share in epoch {position['epoch']}"
