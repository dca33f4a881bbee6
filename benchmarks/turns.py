"""Peers in turn: every round measures each of them once, and each becomes rows."""

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
    """How much is measured.

    Parameters
    ----------
    quick : bool
        Whether to look only whether all works: once, and the small cases alone.
    families : tuple of str
        The peers that are wanted; all where it is empty.
    """

    quick: bool = False
    families: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        """How often each peer has its turn."""
        return 1 if self.quick else 3

    @property
    def few_rounds(self) -> int:
        """The same, where a turn takes long and repeats within itself what it measures."""
        return 1 if self.quick else 2


class Case(Hashable, Protocol):
    """What is measured: a peer, and what it does where."""

    @property
    def peer(self) -> Peer:
        """Who runs it."""

    @property
    def title(self) -> str:
        """What tables call it, without the peer."""


C = TypeVar("C", bound=Case)


def measured(
    cases: Sequence[C],
    rounds: int,
    measure: Callable[[C], Driven],
    tell: Callable[[C, list[Driven]], list[Row]],
) -> list[Row]:
    """Measure cases round robin, so that all see the same hours of the machine.

    Parameters
    ----------
    cases : sequence of Case
        What is measured.
    rounds : int
        How often.
    measure : callable
        Measures a case once.
    tell : callable
        Makes rows of what a case gave in all rounds.

    Returns
    -------
    list of Row
        A case that failed is one row, which says how; it is not tried again.
    """
    told: dict[C, list[Driven]] = {case: [] for case in cases}
    failed = {case: case.peer.missing for case in cases if case.peer.missing}
    for number in range(rounds):
        first = number % max(1, len(cases))
        for case in [*cases[first:], *cases[:first]]:
            if case in failed:
                continue
            began = time.monotonic()
            try:
                told[case].append(measure(case))
            except Failed as failure:
                failed[case] = str(failure)
            _say(f"round {number + 1}: {case.peer.title}, {case.title}", began, failed.get(case))
    return [row for case in cases for row in _rows(case, told[case], failed.get(case), tell)]


def _say(what: str, began: float, failure: str | None) -> None:
    ending = f"failed: {failure}" if failure else "measured"
    print(f"{what}: {ending} ({time.monotonic() - began:.0f} s)", flush=True, file=sys.stderr)


def _rows(
    case: C, told: list[Driven], failure: str | None, tell: Callable[[C, list[Driven]], list[Row]]
) -> list[Row]:
    if failure:
        return [row_of_failure(case.peer, case.title, failure)]
    return tell(case, told)
