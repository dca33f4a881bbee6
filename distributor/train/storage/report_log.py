"""The log of what a training run has reported: JSON lines, rewritten whole each time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distributor.train.storage.checkpoint_store import RECORD, Storage

FILE = "reports.jsonl"
"""The run's record, for people and for `Result`."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What all ranks reported once.

    Parameters
    ----------
    number : int
        Which report it was, from 0, those of earlier attempts counted that it goes on from.
    metrics : mapping of str to object
        Rank 0's.
    checkpoint : str or None
        The name of the checkpoint that came with it.
    world_size, attempt : int
        On how many ranks, and in which attempt of its run.
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
    """Write reports as lines of JSON."""
    return b"".join(json.dumps(asdict(report)).encode() + b"\n" for report in reports)


def from_lines(text: bytes) -> list[Report]:
    """Read such lines, up to one that was cut short."""
    reports = []
    for line in text.splitlines():
        try:
            reports.append(Report(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return reports


def recorded(storage: Storage) -> list[Report]:
    """Read all that a run has reported, as the run's record or its latest checkpoint has it."""
    records = [FILE, *(f"{name}/{RECORD}" for name, _ in storage.committed()[-1:])]
    found = [from_lines(storage.read(record) or b"") for record in records]
    return max(found, key=lambda reports: reports[-1].at if reports else 0.0)
