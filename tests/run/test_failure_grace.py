"""When the ranks that still run are stopped after a failure: timelines on a fake clock."""

from __future__ import annotations

import pytest

from distributor.policies import (
    AFTER_CAUSE_SECONDS,
    AFTER_COLLATERAL_SECONDS,
    LATE_START_SECONDS,
    FailureGracePeriod,
)
from distributor.serialization.outcome import Failure, Origin

ALL_STARTED = [(0.0, "start 0"), (0.0, "start 1")]
NEVER = float("inf")


def failure(*, collateral: bool) -> Failure:
    origin = Origin(rank=0, local_rank=0, host="here")
    return Failure(origin=origin, summary="", text="", pickled=None, collateral=collateral)


class Timeline:
    """A grace period of two ranks, on virtual time."""

    def __init__(self, head_start: float) -> None:
        self.now = 0.0
        self.head_start = head_start
        self.period = FailureGracePeriod(2)

    def play(self, event: str) -> None:
        what, _, number = event.partition(" ")
        if what == "start":
            self.period.note_start(int(number), self.now)
        else:
            self.period.note_failure(failure(collateral=what == "collateral"), self.now)

    def over_at(self, seconds: float) -> bool:
        self.now = seconds
        return self.period.is_over(seconds - self.head_start)


AFTER_CAUSE, AFTER_COLLATERAL = AFTER_CAUSE_SECONDS, AFTER_COLLATERAL_SECONDS
LATE = LATE_START_SECONDS
TIMELINES: dict[str, tuple[list[tuple[float, str]], float, float]] = {
    "all is well": (ALL_STARTED, 0.0, NEVER),
    "a cause": ([*ALL_STARTED, (7.0, "cause")], 0.0, 7.0 + AFTER_CAUSE),
    "a consequence": ([*ALL_STARTED, (7.0, "collateral")], 0.0, 7.0 + AFTER_COLLATERAL),
    "the cause comes after its consequence": (
        [*ALL_STARTED, (7.0, "collateral"), (8.0, "cause")],
        0.0,
        8.0 + AFTER_CAUSE,
    ),
    "consequences one after another delay nothing": (
        [*ALL_STARTED, (7.0, "collateral"), (11.9, "collateral")],
        0.0,
        7.0 + AFTER_COLLATERAL,
    ),
    "one never starts": (
        [(0.0, "start 0"), (1.0, "start 0"), (7.0, "cause")],
        0.0,
        7.0 + AFTER_CAUSE + LATE,
    ),
    "one starts late, and may fail alike": (
        [(0.0, "start 0"), (7.0, "cause"), (9.0, "start 1")],
        0.0,
        9.0 + AFTER_CAUSE,
    ),
    "the driver decides first": ([*ALL_STARTED, (7.0, "cause")], 20.0, 27.0 + AFTER_CAUSE),
}


@pytest.mark.parametrize(("events", "head_start", "over"), TIMELINES.values(), ids=TIMELINES)
def test_the_period_ends_at_the_expected_time_and_not_before(
    events: list[tuple[float, str]],
    head_start: float,
    over: float,
) -> None:
    timeline = Timeline(head_start)
    for at, event in events:
        assert not timeline.over_at(at)
        timeline.play(event)
        assert not timeline.over_at(at)
    if over == NEVER:
        assert not timeline.over_at(1e9)
    else:
        assert not timeline.over_at(over - 0.01)
        assert timeline.over_at(over)
        assert timeline.over_at(over + 100.0)
