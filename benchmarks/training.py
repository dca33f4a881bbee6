"""Training speed of a small model on rank 0, which a launcher must not reduce."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks import functions
from benchmarks.measure import Driven, apart
from benchmarks.peers import PEERS, Peer, chosen
from benchmarks.report import Row, gathered, row
from benchmarks.spark import LOCAL
from benchmarks.turns import Effort, measured

NAMES = ("ours", "ours_cold", "torchrun", "spawn")
RANKS = 2
STEPS, FEW_STEPS = 500, 100
WARM_UP = 50
RUNS = 2
SPEED = "speed"
DEADLINE = 300.0


class Case(NamedTuple):
    """A launcher and a number of steps."""

    peer: Peer
    steps: int

    @property
    def title(self) -> str:
        return titled(self.steps)


def titled(steps: int) -> str:
    """Return the title of a case."""
    return f"DistributedDataParallel on gloo, {RANKS} ranks, {steps} steps"


def measure(effort: Effort) -> list[Row]:
    """Measure training."""
    steps = FEW_STEPS if effort.quick else STEPS
    cases = [Case(peer, steps) for peer in chosen(NAMES, effort.families)]
    return measured(cases, effort.rounds, _drive, _rows)


def drive(peer: str, steps: int) -> dict[str, Any]:
    """Train several times in one driver."""
    with PEERS[peer].open(LOCAL, RANKS) as run:
        return {"rates": [run(functions.train, steps, WARM_UP) for _ in range(RUNS)]}


def _drive(case: Case) -> Driven:
    return apart(drive, DEADLINE, peer=case.peer.name, steps=case.steps)


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    return [row(case.peer, case.title, SPEED, gathered(measurements, "rates"), "steps/s")]
