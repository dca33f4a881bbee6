"""The log of a training run's reports: JSON lines, of which only the latest are written again."""

# A log is a file with the latest reports. If there are many, its first line names a file of the run
# with those before them, a segment, whose first line may name another one. A segment is written
# once and under a new name, before any log that refers to it. So a report is written a few times,
# however long the run, and a killed attempt leaves no more than a segment to which nothing refers.

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distributor.core.resources import format_bytes
from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import CHECKPOINT_LOG, RUN_LOG

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
        self._count = 0
        self._after: str | None = None
        self._lines: list[bytes] = []  # of the latest reports, which are in no segment

    def restore(self, text: bytes) -> int:
        """Continue from a log that was written, and return the number of reports up to its end."""
        self._after, latest = _parse(text)
        self._count = latest[-1].number + 1 if latest else 0
        self._lines = [_to_line(asdict(report)) for report in latest]
        return self._count

    def add(self, report: Report) -> None:
        self._count += 1
        self._lines.append(_to_line(asdict(report)))

    def content(self) -> bytes:
        """Return the log as it is to be written; write a segment first if it is long."""
        if sum(map(len, self._lines)) > SEGMENT_BYTES and len(self._lines) > 1:
            first = self._count - len(self._lines)
            name = f"{SEGMENTS}/{first:09d}-{secrets.token_hex(4)}.jsonl"
            self._storage.write(name, _joined(self._after, self._lines[:-1]))
            self._after = name
            del self._lines[:-1]
        return _joined(self._after, self._lines)


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


def _joined(after: str | None, lines: Sequence[bytes]) -> bytes:
    return b"".join([*([] if after is None else [_to_line({AFTER: after})]), *lines])


def _to_line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


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
