"""When tasks that wait for others of their run give their slots back, on virtual time."""

from __future__ import annotations

import random

import pytest

from distributor.policies import Gathering


def test_without_a_task_nothing_is_given_back() -> None:
    gathering = Gathering("run", 0.0)
    gathering.note(0, 0.0)
    assert not gathering.is_futile(1e6)


class Pool:
    """Slots for which two runs compete; which of them gets the next one is random."""

    def __init__(self, slots: int, seed: int) -> None:
        self.free = slots
        self.random = random.Random(seed)


class Contender:
    """A run that needs several slots at once, works for a while, and gives them back."""

    def __init__(self, pool: Pool, run_id: str, wanted: int) -> None:
        self.pool, self.wanted = pool, wanted
        self.gathering = Gathering(run_id, 0.0)
        self.held, self.resumes_at = 0, 0.0
        self.started_at: float | None = None
        self.is_done = False

    def step(self, now: float) -> None:
        if self.is_done or now < self.resumes_at:
            return
        if self.started_at is not None:
            if now > self.started_at + 60:
                self._give_back()
                self.is_done = True
            return
        if self.pool.free and self.pool.random.random() < 0.5:
            self.pool.free -= 1
            self.held += 1
        self.gathering.note(self.held, now)
        if self.held == self.wanted:
            self.started_at = now
        elif self.gathering.is_futile(now):
            self._give_back()
            self.resumes_at = now + self.gathering.give_back(now)

    def _give_back(self) -> None:
        self.pool.free += self.held
        self.held = 0


@pytest.mark.parametrize("seed", range(5))
def test_two_runs_that_each_need_all_slots_both_end(seed: int) -> None:
    pool = Pool(8, seed)
    runs = [Contender(pool, f"{seed}-{name}", 8) for name in ("one", "two")]
    now = 0.0
    while not all(run.is_done for run in runs):
        now += 0.25
        pool.random.shuffle(runs)
        for run in runs:
            run.step(now)
        assert now < 600, "a default start_timeout"
