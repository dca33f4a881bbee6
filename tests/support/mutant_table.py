"""The mutants of `make mutants`: mistakes against promises of README, guarantees, architecture.

They are in ``mutant_table.diff``, which says how to read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_suffix(".diff")


class Mutant(NamedTuple):
    """A mistake in the package, and the test that must fail because of it."""

    promise: str
    path: str
    old: str
    new: str
    test: str


def _mutant(entry: str) -> Mutant:
    head, *change, test = entry.splitlines()
    path, _, promise = head.partition(": ")
    old, new = ("\n".join(line[2:] for line in change if line[0] == sign) for sign in "-+")
    whole_line = "" if change[-1].startswith("+") else "\n"
    return Mutant(promise, f"distributor/{path}", old + whole_line, new, test)


MUTANTS = [_mutant(each) for each in TABLE.read_text().split("\n\n") if not each.startswith("#")]
