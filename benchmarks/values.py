"""Time to send a large value from rank 0 to the driver, and large arguments to every rank."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import functions
from benchmarks.functions import MEGABYTE
from benchmarks.launchers import Run
from benchmarks.measure import Driven, apart
from benchmarks.peers import PEERS, Peer, chosen
from benchmarks.report import Row, gathered, row
from benchmarks.spark import EMBEDDED, LOCAL
from benchmarks.turns import Effort, measured

HERE = ("ours", "pyspark", "torchrun", "floor_copy")
THROUGH_SPARK = ("ours", "pyspark", "floor_copy")
FOR_ARGUMENTS = ("ours", "pyspark", "floor_sockets")
VALUES = (1, 100, 1000, 2000)
ARGUMENTS = (1, 100, 500)
VALUE_ALONE, ARGUMENTS_ALONE = "the value alone", "the arguments alone"
AGAIN = "the same arguments again"
SMALL = 100
"""Size in megabytes of the quick measurements, and minimum size for which a rate is shown."""
RANKS = 2
DEADLINE = 600.0
ROUNDS = 1
"""Each driver alternates runs with and without the value, several times."""
AT_MOST = 7
SECONDS = {3: 12.0, 2: 60.0}
"""By number of turns, the seconds after which a driver that has made as many starts no other."""


class Case(NamedTuple):
    """A launcher, a place and a size in megabytes."""

    peer: Peer
    place: str
    megabytes: int

    @property
    def title(self) -> str:
        return titled(self.place, self.megabytes)


def titled(place: str, megabytes: int) -> str:
    """Return the title of a case."""
    return f"{place}, {megabytes:,} MB"


def measure(effort: Effort) -> list[Row]:
    """Measure values."""
    return measured(_cases(VALUES, THROUGH_SPARK, effort), ROUNDS, _drive_value, _rows_of_value)


def measure_arguments(effort: Effort) -> list[Row]:
    """Measure arguments."""
    cases = _cases(ARGUMENTS, FOR_ARGUMENTS, effort)
    return measured(cases, ROUNDS, _drive_arguments, _rows_of_arguments)


def drive_value(peer: str, place: str, size: int) -> dict[str, Any]:
    """Measure runs in which rank 0 creates tensors, with and without returning them."""
    whole: list[float] = []
    without: list[float] = []
    with PEERS[peer].open(place, RANKS) as run:
        _timed(run, functions.weights_of_rank_0, 4)  # the first makes the driver import torch
        for mark in _turns():
            without.append(_timed(run, functions.made_and_kept, size)[0])
            seconds, value = _timed(run, functions.weights_of_rank_0, size, float(mark))
            if not functions.is_intact(value, size, float(mark)):
                raise RuntimeError("the value is not what the rank returned")
            del value
            whole.append(seconds)
    return {"whole": whole, "alone": _beyond(whole, without)}


def drive_arguments(peer: str, place: str, size: int) -> dict[str, Any]:
    """Measure runs of two ranks that read tensors: new ones, the same again, and tiny ones."""
    new: list[float] = []
    same: list[float] = []
    without: list[float] = []
    tiny = functions.weights(4)
    with PEERS[peer].open(place, RANKS) as run:
        _timed(run, functions.total, tiny)
        for mark in _turns():
            tensors = functions.weights(size, float(mark))
            expected = functions.total(tensors)
            for measurements in (new, same):
                seconds, value = _timed(run, functions.total, tensors)
                if not math.isclose(value, expected, rel_tol=1e-6):
                    raise RuntimeError("the ranks read other arguments")
                measurements.append(seconds)
            without.append(_timed(run, functions.total, tiny)[0])
    return {"whole": new, "alone": _beyond(new, without), "again": _beyond(same, without)}


def _turns() -> Iterator[int]:
    began = time.perf_counter()
    for number in range(1, AT_MOST + 1):
        yield number
        seconds = time.perf_counter() - began
        if any(number >= turns and seconds > most for turns, most in SECONDS.items()):
            return


def _timed(run: Run, function: Run, *args: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    value = run(function, *args)
    return time.perf_counter() - began, value


def _beyond(whole: list[float], without: list[float]) -> list[float]:
    usual = statistics.median(without)
    return [seconds - usual for seconds in whole]


def _cases(sizes: tuple[int, ...], through_spark: tuple[str, ...], effort: Effort) -> list[Case]:
    return [
        Case(peer, place, size)
        for place, names in ((LOCAL, HERE), (EMBEDDED, through_spark))
        for size in sizes
        for peer in chosen(names, effort.families)
        if size == SMALL or not effort.quick
    ]


def _drive_value(case: Case) -> Driven:
    return apart(drive_value, DEADLINE, **_parameters(case))


def _drive_arguments(case: Case) -> Driven:
    return apart(drive_arguments, DEADLINE, **_parameters(case))


def _parameters(case: Case) -> dict[str, Any]:
    return {
        "peer": case.peer.name,
        "place": case.place,
        "size": case.megabytes * MEGABYTE,
    }


def _rows_of_value(case: Case, measurements: list[Driven]) -> list[Row]:
    return [
        row(case.peer, case.title, "whole run", gathered(measurements, "whole")),
        _rated(case, VALUE_ALONE, gathered(measurements, "alone")),
    ]


def _rows_of_arguments(case: Case, measurements: list[Driven]) -> list[Row]:
    return [
        row(case.peer, case.title, "whole run", gathered(measurements, "whole")),
        _rated(case, ARGUMENTS_ALONE, gathered(measurements, "alone")),
        _rated(case, AGAIN, gathered(measurements, "again")),
    ]


def _rated(case: Case, what: str, seconds: list[float]) -> Row:
    usual = statistics.median(seconds)
    # For small values, the difference of two runs is mostly noise.
    rate = f"{case.megabytes / 1000 / usual:.2f} GB/s" if case.megabytes >= SMALL else ""
    return row(case.peer, case.title, what, seconds, note=rate)
