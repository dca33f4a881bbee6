"""Cost of reporting a checkpoint to storage, compared with saving it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import functions
from benchmarks.functions import MEGABYTE
from benchmarks.launchers import ours
from benchmarks.measure import Driven, apart
from benchmarks.peers import Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import LOCAL
from benchmarks.turns import Effort, measured
from distributor.core.versions import DISTRIBUTION

OURS = Peer(
    "ours",
    "dcp.save and report",
    ours,
    DISTRIBUTION,
    note="delete_local_checkpoint_after_upload=True",
)
KEPT = Peer("ours_kept", "dcp.save and report, which copies", ours, DISTRIBUTION)
ALONE = Peer("floor_save", "floor: dcp.save alone", ours, "torch")
RANKS = 2
MEGABYTES, FEW_MEGABYTES = 1000, 100
TURNS, FEW_TURNS = 5, 1
SAVED, RATIO, BLOCKED = "saved", "beside dcp.save alone", "loop blocked by ASYNC"
DEADLINE = 600.0


class Case(NamedTuple):
    """A checkpoint size in megabytes, of all ranks together."""

    peer: Peer
    megabytes: int
    turns: int

    @property
    def title(self) -> str:
        return titled(self.megabytes)


def titled(megabytes: int) -> str:
    """Return the title of a case."""
    return f"{megabytes:,} MB of {RANKS} ranks, storage on the same disk"


def measure(effort: Effort) -> list[Row]:
    """Measure checkpoints."""
    if effort.families and OURS.family not in effort.families:
        return []
    size, turns = (FEW_MEGABYTES, FEW_TURNS) if effort.quick else (MEGABYTES, TURNS)
    return measured([Case(OURS, size, turns)], effort.rounds, _drive, _rows)


def drive(size: int, turns: int) -> dict[str, Any]:
    """Save repeatedly: alone, with a report, and with a report in the background."""
    folder = Path("storage").absolute()
    with ours(LOCAL, RANKS, storage_path=folder, name="run") as run:
        measurements = run(functions.save_in_turns, size // RANKS, turns, str(folder / "run"))
    return {way: [turn[way] for turn in measurements] for way in measurements[0]}


def _drive(case: Case) -> Driven:
    return apart(drive, DEADLINE, size=case.megabytes * MEGABYTE, turns=case.turns)


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    alone, taken, kept, blocked = (gathered(measurements, way) for way in functions.WAYS_TO_SAVE)
    return [
        row(OURS, case.title, SAVED, taken),
        row(KEPT, case.title, SAVED, kept),
        row(ALONE, case.title, SAVED, alone),
        row(OURS, case.title, RATIO, _beside(taken, alone), ""),
        row(KEPT, case.title, RATIO, _beside(kept, alone), ""),
        row(OURS, case.title, BLOCKED, [100 * r for r in _beside(blocked, alone)], "%"),
    ]


def _beside(seconds: list[float], alone: list[float]) -> list[float]:
    return [one / other for one, other in zip(seconds, alone, strict=True)]
