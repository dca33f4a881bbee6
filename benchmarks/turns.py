"""Round-robin measurements: every round measures each case once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from benchmarks.measure import Driven, Failed
from benchmarks.peers import Peer
from benchmarks.report import Row, row_of_failure


@dataclass(frozen=True)
class Effort:
    """Number of rounds and the peers to measure.

    Parameters
    ----------
    quick : bool
        Whether to measure the small cases only, once, to see that everything works.
    families : tuple of str
        Families of peers to measure; all if empty.
    """

    quick: bool = False
    families: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return 1 if self.quick else 3

    @property
    def few_rounds(self) -> int:
        """Number of rounds for long cases, which repeat their measurement within a round."""
        return 1 if self.quick else 2


class Case(Hashable, Protocol):
    """One measurement: a peer and what it runs."""

    @property
    def peer(self) -> Peer:
        """The launcher."""

    @property
    def title(self) -> str:
        """Title in tables, without the launcher."""


C = TypeVar("C", bound=Case)


def measured(
    cases: Sequence[C],
    rounds: int,
    measure: Callable[[C], Driven],
    to_rows: Callable[[C, list[Driven]], list[Row]],
) -> list[Row]:
    """Measure cases round robin, so that changes in the machine's load affect all of them.

    Parameters
    ----------
    cases : sequence of Case
        The cases.
    rounds : int
        Number of rounds.
    measure : callable
        Function that measures a case once.
    to_rows : callable
        Function that converts the measurements of all rounds to rows.

    Returns
    -------
    list of Row
        Rows of all cases. A case that failed is one row with its error; it is not repeated.
    """
    measurements: dict[C, list[Driven]] = {case: [] for case in cases}
    failed = {case: case.peer.missing for case in cases if case.peer.missing}
    for number in range(rounds):
        first = number % max(1, len(cases))
        for case in [*cases[first:], *cases[:first]]:
            if case in failed:
                continue
            began = time.monotonic()
            try:
                measurements[case].append(measure(case))
            except Failed as failure:
                failed[case] = str(failure)
            _say(f"round {number + 1}: {case.peer.title}, {case.title}", began, failed.get(case))
    return [
        row for case in cases for row in _rows(case, measurements[case], failed.get(case), to_rows)
    ]


def _say(what: str, began: float, failure: str | None) -> None:
    ending = f"failed: {failure}" if failure else "measured"
    print(f"{what}: {ending} ({time.monotonic() - began:.0f} s)", flush=True, file=sys.stderr)


def _rows(
    case: C,
    measurements: list[Driven],
    failure: str | None,
    to_rows: Callable[[C, list[Driven]], list[Row]],
) -> list[Row]:
    if failure:
        return [row_of_failure(case.peer, case.title, failure)]
    return to_rows(case, measurements)
