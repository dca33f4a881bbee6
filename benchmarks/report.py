"""Output of the benchmarks: rows, tables and the file of results."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Driven
from benchmarks.packages import machine, versions
from benchmarks.peers import Peer

REFERENCE = "ours"
RESULTS = "results.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of one peer.

    Parameters
    ----------
    case, what : str
        The case, and the quantity that was measured.
    peer, title : str
        Name and title of the launcher.
    unit : str
        Unit of the values.
    values : tuple of float
        The measurement of each repetition; empty if it failed.
    versions : dict of str to str
        Versions of Python, torch, PySpark and the launcher.
    package : str
        Package of the launcher among them.
    note : str
        Remark for the reader, or the error.
    ratio : float, optional
        Ratio of the median to that of the reference in the same case.
    """

    case: str
    what: str
    peer: str
    title: str
    unit: str
    values: tuple[float, ...]
    versions: dict[str, str]
    package: str = ""
    note: str = ""
    ratio: float | None = None
    ratio_to: str = field(default=REFERENCE)

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    def measurements(self) -> dict[str, Any]:
        """Return the row in the format of the file of results."""
        spread = {"min": min(self.values), "max": max(self.values)} if self.values else {}
        summary = {"median": self.median, "repeats": len(self.values), **spread}
        return {**asdict(self), **summary}


def row(
    peer: Peer, case: str, what: str, values: Sequence[float], unit: str = "s", note: str = ""
) -> Row:
    """Return a row of measurements."""
    return Row(
        case=case,
        what=what,
        peer=peer.name,
        title=peer.title,
        unit=unit,
        values=tuple(values),
        versions=versions(peer.package),
        package=peer.package or "",
        note="; ".join(filter(None, [note, peer.note])),
    )


def row_of_failure(peer: Peer, case: str, why: str) -> Row:
    """Return the row of a launcher that failed."""
    return row(peer, case, "failed", (), note=why)


def gathered(measurements: list[Driven], key: str) -> list[float]:
    """Return the measurements of all rounds, which have one or several values each."""
    found = [driven.facts[key] for driven in measurements]
    return [value for some in found for value in (some if isinstance(some, list) else [some])]


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Add to each row its ratio to the reference in the same case."""
    references = {(r.case, r.what): r.median for r in rows if r.peer == REFERENCE}
    return [_with_ratio(r, references.get((r.case, r.what))) for r in rows]


def _with_ratio(row: Row, reference: float | None) -> Row:
    if row.median is None or not reference or not row.unit:
        return row  # a quantity without a unit is already a ratio or an exponent
    fields = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return Row(**{**fields, "ratio": row.median / reference})


def table(rows: Sequence[Row]) -> str:
    """Format rows as a text table."""
    head = ("case", "what", "peer", "version", "median", "min - max", "repeats", "ratio", "note")
    cells = [head, *(_cells(r) for r in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head) - 1)]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        lines.append("  ".join([*padded, line[-1]]).rstrip())
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    version = row.versions.get(row.package, "")
    median = "" if row.median is None else f"{_short(row.median)} {row.unit}"
    spread = f"{_short(min(row.values))} - {_short(max(row.values))}" if row.values else ""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    repeats = str(len(row.values))
    return (row.case, row.what, row.title, version, median, spread, repeats, ratio, row.note)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def save(folder: Path, name: str, rows: Sequence[Row], *, quick: bool, extra: Any = None) -> None:
    """Replace the rows of one benchmark in the file of results."""
    folder.mkdir(parents=True, exist_ok=True)
    results = load(folder)
    results[name] = {
        "when": time.strftime("%Y-%m-%d"),
        "quick": quick,
        "machine": machine(),
        "rows": [r.measurements() for r in rows],
        **({} if extra is None else {"extra": extra}),
    }
    Path(folder, RESULTS).write_text(json.dumps(results, indent=1) + "\n")


def load(folder: Path) -> dict[str, Any]:
    """Read the file of results; return an empty dict if there is none."""
    file = Path(folder, RESULTS)
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return results
