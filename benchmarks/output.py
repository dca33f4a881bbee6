"""Throughput and completeness of the ranks' output, and the cost of printing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import functions
from benchmarks.measure import Driven, apart
from benchmarks.peers import PEERS, Peer, chosen
from benchmarks.report import Row, gathered, row
from benchmarks.spark import LOCAL
from benchmarks.turns import Effort, measured

SHOWN = ("ours", "pyspark", "torchrun")
KEPT = ("ours", "torchrun")
LINES, FEW_LINES = 1_000_000, 100_000
LOOP_SECONDS, SHORT_SECONDS = 3.0, 1.0
LINES_PER_SECOND = 1000
LOOP = f"a loop that prints {LINES_PER_SECOND:,} lines/s"
READ, LEFT = "until they are read", "speed that is left"
LOOPS = 2
DEADLINE = 300.0
LOGS = "logs"
KEEPING: dict[str, dict[str, Any]] = {
    "ours": {"log_dir": LOGS, "show_output": "none"},
    "torchrun": {"log_dir": LOGS},
}
_LINE = re.compile(functions.LINE.encode() + rb" (\d+)")


class Case(NamedTuple):
    """A launcher whose rank prints a number of lines, which are shown or stored in files."""

    peer: Peer
    lines: int
    kept: bool

    @property
    def title(self) -> str:
        return titled(self.lines, kept=self.kept)


class Loop(NamedTuple):
    """A launcher whose rank computes and prints for some seconds."""

    peer: Peer
    seconds: float

    @property
    def title(self) -> str:
        return LOOP


def titled(lines: int, *, kept: bool) -> str:
    """Return the title of a case that prints as fast as possible."""
    return f"{lines:,} lines " + ("into files" if kept else "through a pipe")


def measure(effort: Effort) -> list[Row]:
    """Measure output."""
    lines = FEW_LINES if effort.quick else LINES
    cases = [
        Case(peer, lines, kept)
        for kept, names in ((False, SHOWN), (True, KEPT))
        for peer in chosen(names, effort.families)
    ]
    seconds = SHORT_SECONDS if effort.quick else LOOP_SECONDS
    loops = [Loop(peer, seconds) for peer in chosen(SHOWN, effort.families)]
    return [
        *measured(cases, effort.rounds, _drive, _rows),
        *measured(loops, effort.rounds, _drive_loop, _rows_of_loop),
    ]


def drive(peer: str, lines: int, kept: bool) -> dict[str, Any]:
    """Let one rank print, in a driver's second run."""
    settings = KEEPING[peer] if kept else {}
    with PEERS[peer].open(LOCAL, 1, **settings) as run:
        run(functions.print_lines, 0)
        began, seconds = run(functions.print_lines, lines)
    files = _files() if kept else []
    return {
        "began": began,
        "printed": lines / seconds,
        "found": _count(b"".join(file.read_bytes() for file in files)),
        "last": max((file.stat().st_mtime for file in files if file.stat().st_size), default=0.0),
    }


def drive_loop(peer: str, seconds: float) -> dict[str, Any]:
    """Measure one rank's steps, alternately without and with printing."""
    silent, printing = [], []
    with PEERS[peer].open(LOCAL, 1) as run:
        for _ in range(LOOPS):
            silent.append(run(functions.loop, seconds, 0))
            printing.append(run(functions.loop, seconds, LINES_PER_SECOND))
    share = [100 * b / a for a, b in zip(silent, printing, strict=True)]
    return {"silent": silent, "printing": printing, "share": share}


def _files() -> list[Path]:
    return [file for file in Path(LOGS).rglob("*") if file.is_file()]


def _count(text: bytes) -> int:
    return len(set(_LINE.findall(text)))


def _drive(case: Case) -> Driven:
    return apart(drive, DEADLINE, peer=case.peer.name, lines=case.lines, kept=case.kept)


def _drive_loop(case: Loop) -> Driven:
    return apart(drive_loop, DEADLINE, peer=case.peer.name, seconds=case.seconds)


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    ends = [_end_in_files(one) if case.kept else _end_in_pipe(one) for one in measurements]
    rates = [
        case.lines / (end.at - one.facts["began"])
        for end, one in zip(ends, measurements, strict=True)
    ]
    lost = [case.lines - end.found for end in ends]
    where = "until they are there" if case.kept else READ
    return [
        row(
            case.peer,
            case.title,
            "as the rank prints",
            gathered(measurements, "printed"),
            "lines/s",
        ),
        row(case.peer, case.title, where, rates, "lines/s"),
        row(case.peer, case.title, "lost", lost, "lines"),
    ]


class _End(NamedTuple):
    """Time at which the last line arrived, and the number of lines."""

    at: float
    found: int


def _end_in_files(measurements: Driven) -> _End:
    return _End(measurements.facts["last"], measurements.facts["found"])


def _end_in_pipe(measurements: Driven) -> _End:
    word = functions.LINE.encode()
    at = max((printed.at for printed in measurements.printed if word in printed.data), default=0.0)
    return _End(at, _count(b"".join(printed.data for printed in measurements.printed)))


def _rows_of_loop(case: Loop, measurements: list[Driven]) -> list[Row]:
    return [
        row(case.peer, case.title, "without printing", gathered(measurements, "silent"), "steps/s"),
        row(case.peer, case.title, "printing", gathered(measurements, "printing"), "steps/s"),
        row(case.peer, case.title, LEFT, gathered(measurements, "share"), "%"),
    ]
