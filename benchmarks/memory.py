"""Memory of ranks that train; shared pages are counted once."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from benchmarks import functions
from benchmarks.functions import MEGABYTE
from benchmarks.measure import Driven, apart
from benchmarks.peers import PEERS, Peer, chosen
from benchmarks.report import Row, gathered, row
from benchmarks.spark import LOCAL
from benchmarks.turns import Effort, measured

NAMES = ("ours", "ours_cold", "torchrun", "spawn")
RANKS, MORE_RANKS = 2, 8
EACH = "each rank (PSS)"
DEADLINE = 120.0


class Case(NamedTuple):
    """A launcher and a number of ranks."""

    peer: Peer
    ranks: int

    @property
    def title(self) -> str:
        return titled(self.ranks)


def titled(ranks: int) -> str:
    """Return the title of a case."""
    return f"after one training step, {ranks} ranks"


def measure(effort: Effort) -> list[Row]:
    """Measure memory."""
    cases = [
        Case(peer, ranks)
        for ranks in ((RANKS,) if effort.quick else (RANKS, MORE_RANKS))
        for peer in chosen(NAMES, effort.families)
    ]
    return measured(cases, effort.few_rounds, _drive, _rows)


def drive(peer: str, ranks: int) -> dict[str, Any]:
    """Measure the memory of a driver's second run."""
    with PEERS[peer].open(LOCAL, ranks) as run:
        run(functions.rendezvous)
        weights = run(functions.weigh, os.getpid())
    per_rank = [weight / MEGABYTE for weight in weights["ranks"]]
    return {"rank": sum(per_rank) / ranks, "run": weights["run"] / MEGABYTE}


def _drive(case: Case) -> Driven:
    return apart(drive, DEADLINE, peer=case.peer.name, ranks=case.ranks)


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    everything = "all processes but the driver"
    return [
        row(case.peer, case.title, EACH, gathered(measurements, "rank"), "MB"),
        row(case.peer, case.title, f"{everything} (PSS)", gathered(measurements, "run"), "MB"),
    ]
