"""Rows of a DataFrame or of Parquet files as batches on each rank: rate, start, memory, growth."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import loaders
from benchmarks.functions import MEGABYTE
from benchmarks.loaders import ARRAY, IMAGE, SCALARS
from benchmarks.measure import Driven, apart
from benchmarks.peers import Peer
from benchmarks.report import Row, gathered, row
from benchmarks.spark import EMBEDDED
from benchmarks.turns import Effort, measured
from distributor.core.versions import DISTRIBUTION

LOADERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "distributor, a DataFrame", loaders.dataframe, DISTRIBUTION),
        Peer("ours_parquet", "distributor, from_parquet", loaders.parquet, DISTRIBUTION),
        Peer("pyspark", "PySpark's loader", loaders.pyspark, "pyspark"),
        Peer("ray", "Ray Data", loaders.ray, "ray", note="reads while it trains"),
        Peer(
            "floor_pyarrow",
            "floor: pyarrow to torch",
            loaders.bare,
            "pyarrow",
            note="reads while it trains",
        ),
    )
}
RANKS = 2
ROWS = {SCALARS: 4_000_000, ARRAY: 200_000, IMAGE: 200_000}
FEWER_ROWS = {
    "pyspark": {SCALARS: 100_000, ARRAY: 20_000},
    "ray": {SCALARS: 1_000_000, ARRAY: 50_000, IMAGE: 50_000},
}
"""For slow loaders. PySpark's takes no binary columns."""
START_ROWS = (100_000, 1_000_000)
GROWING_ROWS = (100_000, 1_000_000, 5_000_000, 20_000_000)
QUICKER = 100
"""How many times fewer rows the quick measurements have."""
RATE, START, LATER_START, WHOLE = (
    "each rank, in the second epoch",
    "until the first batch, first run",
    "until the first batch, later runs",
    "from run to the last batch",
)
OWN_MEMORY, ALL_MEMORY = "memory of a rank (RssAnon)", "memory of a rank (VmRSS)"
EXPONENT = "time grows with the rows to the power of"
EPOCHS = {RATE: 2, START: 0, WHOLE: 1}
"""Epochs that are read; for `START`, only the first batch is."""
LATER_RUNS = 2
DEADLINE = 900.0


class Case(NamedTuple):
    """A loader, a kind of rows, and what is measured: `RATE`, `START` or `WHOLE`."""

    peer: Peer
    kind: str
    rows: int
    what: str

    @property
    def title(self) -> str:
        return titled(self.kind, None if self.what == RATE else self.rows)


def titled(kind: str, rows: int | None = None) -> str:
    """Return the title of a case; rates are compared between different numbers of rows."""
    return f"{kind}, {RANKS} ranks" + (f", {rows:,} rows" if rows else "")


def measure(effort: Effort) -> list[Row]:
    """Measure data loading."""
    cases = [
        case
        for case in _cases(effort)
        if not effort.families or case.peer.family in effort.families
    ]
    with tempfile.TemporaryDirectory() as folder:
        tables = dict.fromkeys((case.kind, case.rows, _data(folder, case)) for case in cases)
        apart(loaders.write_rows, DEADLINE, tables=list(tables))
        rows_of = {RATE: _rates, START: _starts, WHOLE: _wholes}
        found = [
            each
            for what, to_rows in rows_of.items()
            for each in measured(
                [case for case in cases if case.what == what],
                effort.few_rounds,
                lambda case: _drive(folder, case),
                to_rows,
            )
        ]
    return found + _exponents(cases, found)


def drive(peer: str, folder: str, rows: int, epochs: int) -> dict[str, Any]:
    """Read the rows several times in one driver; the first time is apart from the others."""
    with LOADERS[peer].open(EMBEDDED, RANKS) as read:
        found = [_timed(read, folder, rows, epochs) for _ in range(1 + LATER_RUNS)]
    return {"first": found[0], "later": found[1:]}


def _timed(read: loaders.Read, folder: str, rows: int, epochs: int) -> dict[str, Any]:
    began = time.time()
    found = read(folder, rows, epochs)
    whole = time.time() - began
    if epochs == 0:
        return {"start": found["first"] - began}
    if found["rows"] != rows // RANKS:
        raise RuntimeError(f"rank 0 read {found['rows']} of {rows} rows")
    return {**found, "whole": whole}


def _cases(effort: Effort) -> list[Case]:
    fewer = QUICKER if effort.quick else 1
    rates = [
        Case(peer, kind, rows // fewer, RATE)
        for kind in ROWS
        for peer in LOADERS.values()
        if (rows := FEWER_ROWS.get(peer.name, ROWS).get(kind))
    ]
    starts = [
        Case(LOADERS[name], SCALARS, rows // fewer, START)
        for name in ("ours", "ours_parquet", "pyspark")
        for rows in START_ROWS
    ]
    wholes = [
        Case(LOADERS["ours"], SCALARS, rows // fewer, WHOLE)
        for rows in (GROWING_ROWS[1:3] if effort.quick else GROWING_ROWS)
    ]
    return [*rates, *starts, *wholes]


def _data(folder: str, case: Case) -> str:
    return str(Path(folder, f"{case.kind}, {case.rows} rows"))


def _drive(folder: str, case: Case) -> Driven:
    return apart(
        drive,
        DEADLINE,
        peer=case.peer.name,
        folder=_data(folder, case),
        rows=case.rows,
        epochs=EPOCHS[case.what],
    )


def _later(measurements: list[Driven], key: str) -> list[float]:
    return [found[key] for found in gathered(measurements, "later")]  # type: ignore[index]


def _rates(case: Case, measurements: list[Driven]) -> list[Row]:
    rates = _later(measurements, "rate")
    return [row(case.peer, case.title, RATE, rates, "rows/s", f"{case.rows:,} rows")]


def _starts(case: Case, measurements: list[Driven]) -> list[Row]:
    first = [driven.facts["first"]["start"] for driven in measurements]
    return [
        row(case.peer, case.title, START, first),
        row(case.peer, case.title, LATER_START, _later(measurements, "start")),
    ]


def _wholes(case: Case, measurements: list[Driven]) -> list[Row]:
    return [row(case.peer, case.title, WHOLE, _later(measurements, "whole"))] + [
        row(
            case.peer,
            case.title,
            what,
            [size / MEGABYTE for size in _later(measurements, key)],
            "MB",
        )
        for what, key in ((OWN_MEMORY, "RssAnon"), (ALL_MEMORY, "VmRSS"))
    ]


def _exponents(cases: list[Case], found: list[Row]) -> list[Row]:
    """Return the slope between the largest and the second smallest number of rows."""
    medians = {each.case: each.median for each in found if each.what == WHOLE}
    points = [
        (case.rows, median)
        for case in cases
        if case.what == WHOLE and (median := medians.get(case.title))
    ][-3:]
    if len(points) < 2:
        return []
    (few, fast), (many, slow) = points[0], points[-1]
    exponent = math.log(slow / fast) / math.log(many / few)
    title = f"{SCALARS}, {RANKS} ranks, {few:,} to {many:,} rows"
    return [row(LOADERS["ours"], title, EXPONENT, [exponent], "")]
