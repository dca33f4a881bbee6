"""Time of a whole run: ranks rendezvous, reduce, exit, and their value is returned."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

from benchmarks import functions
from benchmarks.measure import Driven, apart, kept
from benchmarks.peers import PEERS, Peer, chosen
from benchmarks.report import Row, gathered, row
from benchmarks.spark import EMBEDDED, LOCAL, managers, standalone
from benchmarks.turns import Effort, measured

ON_ONE_MACHINE = (
    "ours",
    "ours_ahead",
    "ours_cold",
    "pyspark",
    "torchrun",
    "ray",
    "floor_processes",
    "floor_forks",
)
THROUGH_SPARK = ("ours", "ours_ordinary", "ours_cold", "pyspark", "floor_stage")
RANKS = 2
OTHER_RANKS = (1, 4, 8)
ON_OTHER_RANKS = ("ours", "pyspark", "torchrun", "floor_processes", "floor_forks")
DEADLINE = 300.0
FIRST, LATER = "first run", "later runs"
AT_LEAST = 2
AT_MOST = 10
LATER_SECONDS = 6.0
"""Seconds after which a driver starts no further run, once it has made two."""


class Case(NamedTuple):
    """A launcher, a place and a number of ranks."""

    peer: Peer
    place: str
    ranks: int

    @property
    def title(self) -> str:
        return titled(self.place, self.ranks)


def titled(place: str, ranks: int) -> str:
    """Return the title of a case."""
    schemes = {"spark": "standalone", "k8s": "Kubernetes", "yarn": "YARN"}
    where = schemes.get(place.partition("://")[0], place)
    return f"{where}, {ranks} rank{'s' if ranks > 1 else ''}"


def measure(effort: Effort) -> list[Row]:
    """Measure launches on this machine."""
    peers = chosen(ON_ONE_MACHINE, effort.families)
    taken = [peer for peer in peers if not (effort.quick and peer.slow)]
    rows = _measured([Case(peer, LOCAL, RANKS) for peer in taken], effort.rounds)
    for ranks in () if effort.quick else OTHER_RANKS:
        peers = chosen(ON_OTHER_RANKS, effort.families)
        rows += _measured([Case(peer, LOCAL, ranks) for peer in peers], effort.few_rounds)
    return rows


def measure_spark(effort: Effort) -> list[Row]:
    """Measure launches through Spark, in sessions that are already running."""
    peers = chosen(THROUGH_SPARK, effort.families)
    rows = _measured([Case(peer, EMBEDDED, RANKS) for peer in peers], effort.few_rounds)
    with standalone() as (master, pids), kept(pids):
        rows += _measured([Case(peer, master, RANKS) for peer in peers], effort.few_rounds)
    return rows


def measure_managers(effort: Effort) -> list[Row]:
    """Measure launches on YARN and Kubernetes, on the clusters that variables name."""
    peers = chosen(THROUGH_SPARK, effort.families)
    cases = [Case(peer, place, RANKS) for place in managers() for peer in peers]
    return _measured(cases, effort.few_rounds)


def drive(peer: str, place: str, ranks: int) -> dict[str, Any]:
    """Measure the first and later runs of one launcher in this driver."""
    began = time.perf_counter()
    with PEERS[peer].open(place, ranks) as run:
        before = time.perf_counter() - began
        first = _timed(run, ranks)
        later: list[float] = []
        while len(later) < AT_LEAST or (len(later) < AT_MOST and sum(later) < LATER_SECONDS):
            later.append(_timed(run, ranks))
    return {"before": before, "first": first, "later": later}


def _timed(run: Any, ranks: int) -> float:
    began = time.perf_counter()
    value = run(functions.rendezvous)
    seconds = time.perf_counter() - began
    if value not in (None, ranks):
        raise RuntimeError(f"the ranks counted {value}, and are {ranks}")
    return seconds


def _measured(cases: list[Case], rounds: int) -> list[Row]:
    return measured(cases, rounds, _drive, _rows)


def _drive(case: Case) -> Driven:
    return apart(drive, DEADLINE, peer=case.peer.name, place=case.place, ranks=case.ranks)


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    before = statistics.median(gathered(measurements, "before"))
    note = f"{before:.1f} s of set-up before it" if before >= 0.05 else ""
    return [
        row(case.peer, case.title, FIRST, gathered(measurements, "first"), note=note),
        row(case.peer, case.title, LATER, gathered(measurements, "later")),
    ]
