"""Which nodes an attempt lacks, on virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from distributor.control.recovery import FILL_SECONDS, FIRST_PAUSE, LONGEST_PAUSE, Vacancies
from distributor.policies import FailedAttempts


def test_a_lost_node_is_vacant_once_both_of_its_ends_are_known() -> None:
    asked: list[list[int]] = []

    def start(nodes: Collection[int]) -> Collection[int]:
        asked.append(list(nodes))
        return [2]

    vacancies = Vacancies([2, 3])
    vacancies.lose(0, ["node", "link"])
    assert vacancies.is_lost(0)
    assert vacancies.note_end(0, "node")
    assert not vacancies.note_end(1, "node"), "it was not lost"
    vacancies.fill(start, 0.0)
    assert vacancies.note_end(0, "link")
    assert not vacancies.is_lost(0)
    vacancies.fill(start, FILL_SECONDS / 2)
    vacancies.fill(start, FILL_SECONDS)
    assert asked == [[2, 3], [0, 3]]


def test_the_pauses_grow_while_nodes_do_not_start() -> None:
    vacancies, now = Vacancies([1]), 0.0
    asked_at: list[float] = []

    def start(nodes: Collection[int]) -> Collection[int]:
        asked_at.append(now)
        vacancies.note_failed_start(now)
        return ()

    while len(asked_at) < 9:
        vacancies.fill(start, now)
        now += 0.25
    pauses = [after - before for before, after in itertools.pairwise(asked_at)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE


def test_losses_that_are_survived_count() -> None:
    failed = FailedAttempts()
    failed.survive(is_preempted=False)
    failed.survive(is_preempted=True)
    assert (failed.all, failed.num_preempted) == (2, 1)
