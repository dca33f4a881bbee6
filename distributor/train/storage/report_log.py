"""The log of a training run's reports: JSON lines in a file that is rewritten each time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distributor.train.storage.checkpoint_store import Storage
from distributor.train.storage.manifest import CHECKPOINT_LOG

RUN_LOG = "reports.jsonl"
"""The log in the run's folder, for people and for `Result`."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One report of all ranks.

    Parameters
    ----------
    number : int
        Its number, from 0; reports of the earlier attempts that it continues count too.
    metrics : mapping of str to object
        Rank 0's metrics.
    checkpoint : str or None
        The name of the checkpoint that was reported with it.
    world_size, attempt : int
        The number of ranks, and the attempt of the run in which they reported.
    at : float
        When, in seconds since the epoch.
    """

    number: int
    metrics: Mapping[str, Any]
    checkpoint: str | None
    world_size: int
    attempt: int
    at: float = field(default_factory=time.time)


def to_lines(reports: Sequence[Report]) -> bytes:
    """Serialize reports as lines of JSON."""
    return b"".join(json.dumps(asdict(report)).encode() + b"\n" for report in reports)


def from_lines(text: bytes) -> list[Report]:
    """Parse lines of JSON; stop at one that is incomplete."""
    reports = []
    for line in text.splitlines():
        try:
            reports.append(Report(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return reports


def read_reports(storage: Storage) -> list[Report]:
    """Return all reports of a run, from the run's log or the latest checkpoint's, if newer."""
    files = [RUN_LOG, *(f"{name}/{CHECKPOINT_LOG}" for name, _ in storage.committed()[-1:])]
    logs = [from_lines(storage.read(file) or b"") for file in files]
    return max(logs, key=lambda reports: reports[-1].at if reports else 0.0)
