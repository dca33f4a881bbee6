"""Rank 0's part of a report: it appends to the log, commits checkpoints and removes old ones."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributor.core.rank_variables import CheckpointSettings
from distributor.core.resources import format_bytes
from distributor.core.text import counted
from distributor.errors import DistributorError
from distributor.filesystems import describe_error
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.files import (
    CHECKPOINT_LOG,
    COMMITTED,
    PENDING,
    RUN_LOG,
    Manifest,
    StoredFile,
)

# A log of reports is a file of JSON lines, of which only the latest are written again. If there are
# many, its first line names a file of the run with those before them, a segment, whose first line
# may name another one. A segment is written once and under a new name, before any log that refers
# to it. So a report is written a few times, however long the run, and a killed attempt leaves no
# more than a segment to which nothing refers.

SEGMENTS = ".reports"
"""The folder of the segments in the run's folder."""
SEGMENT_BYTES = 256 * 1024
"""Bytes of a log from which on all reports but the last become a segment."""
MAX_METRICS = 64 * 1000**2
"""Bytes of the metrics of one report, which pass through the store of rank 0."""
AFTER = "after"
"""The key of the first line of a log that has a segment before it."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report of all ranks."""

    number: int  # from 0; reports of the earlier attempts that it continues count too
    metrics: Mapping[str, Any]  # those of rank 0
    checkpoint: str | None  # the name of the checkpoint that was reported with it
    world_size: int
    attempt: int  # of the run
    at: float = field(default_factory=time.time)


def json_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of metrics: tensors with one element become numbers, NumPy's arrays lists."""
    text = json.dumps(dict(metrics), default=_plain)
    copy: dict[str, Any] = json.loads(text)
    if len(text) > MAX_METRICS:
        sizes = {name: len(json.dumps(value)) for name, value in copy.items()}
        name = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"The metric {name!r} has {format_bytes(sizes[name])}, but the metrics of a report may "
            f"have {format_bytes(MAX_METRICS)} in all. Save it in a file of the checkpoint."
        )
    return copy


def _plain(value: Any) -> Any:
    try:
        return value.tolist() if type(value).__module__ == "numpy" else value.item()
    except (AttributeError, RuntimeError, ValueError):
        raise TypeError(
            "Metrics must be JSON-serializable, tensors with one element or NumPy arrays, but one "
            f"is {value!r}."
        ) from None


class ReportLog:
    """The log of all reports of an attempt and of those that it continues."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._after: str | None = None
        self._reports: list[Report] = []  # the latest ones, which are in no segment

    def restore(self, text: bytes) -> int:
        """Continue from a log that was written, and return the number of reports up to its end."""
        self._after, self._reports = _parse(text)
        return self._reports[-1].number + 1 if self._reports else 0

    def add(self, report: Report) -> None:
        """Add a report; it replaces the same one of a rank that was lost before it was decided."""
        earlier = [each for each in self._reports if each.number < report.number]
        self._reports = [*earlier, report]

    def content(self) -> bytes:
        """Return the log as it is to be written; write a segment first if it is long."""
        text = _to_text(self._after, self._reports)
        if len(text) > SEGMENT_BYTES and len(self._reports) > 1:
            *earlier, latest = self._reports
            name = f"{SEGMENTS}/{earlier[0].number:09d}-{secrets.token_hex(4)}.jsonl"
            self._storage.write(name, _to_text(self._after, earlier))
            self._after, self._reports = name, [latest]
            text = _to_text(self._after, self._reports)
        return text


def read_log(storage: Storage, text: bytes) -> list[Report]:
    """Return all reports of a log, of which this is the content, with those of its segments."""
    after, reports = _parse(text)
    logs = [reports]
    while after is not None:
        after, reports = _parse(storage.read(after) or b"")
        logs.append(reports)
    return [report for reports in reversed(logs) for report in reports]


def read_reports(storage: Storage) -> list[Report]:
    """Return all reports of a run, from the run's log or the latest checkpoint's, if newer."""
    files = [RUN_LOG, *(f"{name}/{CHECKPOINT_LOG}" for name, _ in storage.committed()[-1:])]
    texts = [storage.read(file) or b"" for file in files]
    return read_log(storage, max(texts, key=_latest_time))


def _latest_time(text: bytes) -> float:
    _, reports = _parse(text)
    return reports[-1].at if reports else 0.0


def _to_text(after: str | None, reports: Iterable[Report]) -> bytes:
    lines: list[dict[str, Any]] = [] if after is None else [{AFTER: after}]
    lines += map(vars, reports)
    return b"".join(json.dumps(fields).encode() + b"\n" for fields in lines)


def _parse(text: bytes) -> tuple[str | None, list[Report]]:
    """Return the segment before a log, if there is one, and its complete reports."""
    after: str | None = None
    reports: list[Report] = []
    for line in text.splitlines():
        try:
            fields = json.loads(line)
            if not reports and AFTER in fields:
                after = fields[AFTER]
            else:
                reports.append(Report(**fields))
        except (ValueError, TypeError):
            break
    return after, reports


def remove_surplus(
    storage: Storage, settings: CheckpointSettings, unfinished: Iterable[str] = ()
) -> list[str]:
    """Remove the checkpoints that are not kept, and unfinished ones.

    Returns descriptions of those that could not be removed.
    """
    surplus = []
    if settings.num_to_keep is not None:  # else the manifests need not be read
        surplus = select_removable(storage.committed(), settings)
    failures = []
    for name in (*surplus, *unfinished):
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

    def rank(pair: tuple[str, Manifest]) -> tuple[float, int]:
        _, manifest = pair
        score = score_of(manifest.metrics, settings.score_attribute or "")
        if score is None:
            return -math.inf, manifest.index
        return (score if settings.score_order == "max" else -score), manifest.index

    return sorted(committed, key=rank)


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
    found = metric_in(metrics, name)
    return found if isinstance(found, (int, float)) and not math.isnan(found) else None


def metric_in(metrics: Mapping[str, Any], name: str) -> Any:
    """Return a metric by its name, or by a path such as ``val/loss``; None if there is none."""
    found: Any = metrics.get(name)
    if found is None:
        found = metrics
        for key in name.split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


LOG_INTERVAL = 10.0
"""Seconds after which reports without a checkpoint are written to the run's log."""


class CheckpointManager:
    """The reports of a training run, and the checkpoints that it keeps.

    Attributes
    ----------
    is_logged : bool
        Whether all reports are in the run's log.
    """

    def __init__(self, storage: Storage, settings: CheckpointSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._log = ReportLog(storage)
        self.is_logged = True
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
        self.is_logged = logged.startswith(text) or (
            read_log(self._storage, logged)[:count] == read_log(self._storage, text)
        )
        return count

    def take_over(self, checkpoint: str | None, unlogged: Iterable[Report]) -> None:
        """Go on with the reports of a lost rank: those that it has written, and these."""
        logs = [RUN_LOG, *([f"{checkpoint}/{CHECKPOINT_LOG}"] if checkpoint else [])]
        text = max((self._storage.read(log) or b"" for log in logs), key=_latest_time)
        count = self._log.restore(text)
        for report in unlogged:
            if report.number >= count:
                self._log.add(report)
                self.is_logged = False

    def add(self, report: Report, index: int, parts: Sequence[dict[str, Any]]) -> None:
        """Add a report of all ranks, in rank order, and commit its checkpoint if it has one.

        `index` is the checkpoint's number. Raises DistributorError if the parts do not agree, or a
        rank could not upload its files.
        """
        for rank, part in enumerate(parts):
            if "error" in part:
                raise DistributorError(failed_upload(rank, self._storage.path, part["error"]))
        saved = [part for part in parts if part["files"] is not None]
        if saved:
            check_in_step([part["positions"] for part in parts])
        self._log.add(report)
        self.is_logged = False
        if saved:
            self._commit(report, index, parts, saved)
        if saved or time.monotonic() > self._logged_at + LOG_INTERVAL:
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

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"distributor: {message}", flush=True)

    def finish(self) -> None:
        """Write the run's log, and remove what an attempt that was killed left to be removed."""
        self.write_log()
        self._remove_others()

    def write_log(self) -> None:
        """Update the run's log; if that fails, each checkpoint still has its own."""
        if self.is_logged:
            return
        try:
            self._storage.write(RUN_LOG, self._log.content())
        except OSError as error:  # mounted object stores cannot overwrite a file
            self._warn_once("log", f"{RUN_LOG} cannot be updated: {describe_error(error)}.")
        self.is_logged, self._logged_at = True, time.monotonic()

    def _commit(
        self,
        report: Report,
        index: int,
        parts: Sequence[dict[str, Any]],
        saved: Sequence[dict[str, Any]],
    ) -> None:
        """Commit a checkpoint, of which some ranks have saved files, and only then remove others.

        Its validation is the one that the first of them requests, if any.
        """
        name = report.checkpoint
        assert name is not None
        files = _merge_files([part["files"] for part in saved])
        if not files:
            self._warn_once("empty", f"{name} is empty: no rank saved a file.")
        self._warn_of_versions(files, parts)
        validation, score = saved[0]["validation"], self._settings.score_attribute
        if (
            validation is None  # its metrics are to come
            and score is not None
            and score_of(report.metrics, score) is None
        ):
            self._warn_once(
                "score",
                f"checkpoint_score_attribute is {score!r}, but the metrics that were reported with "
                f"{name} contain no such number, so it ranks last: {dict(report.metrics)}.",
            )
        log = self._storage.write(f"{name}/{CHECKPOINT_LOG}", self._log.content())
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

    def _remove_others(self, unfinished: Iterable[str] = ()) -> None:
        for failure in remove_surplus(self._storage, self._settings, unfinished):
            print(f"distributor: {failure}", flush=True)  # what is committed stays so


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
    shards = {name for each in positions for name, at in each.items() if "name" in at}
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
