"""When the ranks that still run are stopped after a failure: timelines on a clock of our own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distributor.node.agent import failure_grace
from distributor.node.agent.failure_grace import (
    CAUSE_SECONDS,
    ECHO_SECONDS,
    START_SECONDS,
    FailureGracePeriod,
)
from distributor.serialization.outcome import Failure, Origin

ALL_STARTED = [(0.0, "start 0"), (0.0, "start 1")]
NEVER = float("inf")


def failure(*, collateral: bool) -> Failure:
    origin = Origin(rank=0, local_rank=0, host="here")
    return Failure(origin=origin, summary="", text="", pickled=None, collateral=collateral)


class Timeline:
    """A judge of two ranks, and the time that it sees."""

    def __init__(self, patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(failure_grace, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.judge = FailureGracePeriod(2, patience)

    def play(self, event: str) -> None:
        what, _, number = event.partition(" ")
        if what == "start":
            self.judge.started(int(number))
        else:
            self.judge.failed(failure(collateral=what == "echo"))

    def over_at(self, seconds: float) -> bool:
        self.now = seconds
        return self.judge.over()


@pytest.mark.parametrize(
    ("events", "patience", "over"),
    [
        pytest.param([], 0.0, NEVER, id="nothing happens"),
        pytest.param(ALL_STARTED, 0.0, NEVER, id="all is well"),
        pytest.param([*ALL_STARTED, (7.0, "cause")], 0.0, 7.0 + CAUSE_SECONDS, id="a cause"),
        pytest.param([*ALL_STARTED, (7.0, "echo")], 0.0, 7.0 + ECHO_SECONDS, id="an echo"),
        pytest.param(
            [*ALL_STARTED, (7.0, "echo"), (8.0, "cause")],
            0.0,
            8.0 + CAUSE_SECONDS,
            id="the cause comes after its echo",
        ),
        pytest.param(
            [*ALL_STARTED, (7.0, "cause"), (7.1, "echo")],
            0.0,
            7.0 + CAUSE_SECONDS,
            id="an echo after the cause delays nothing",
        ),
        pytest.param(
            [*ALL_STARTED, (7.0, "echo"), (11.9, "echo")],
            0.0,
            7.0 + ECHO_SECONDS,
            id="echoes one after another delay nothing",
        ),
        pytest.param(
            [(0.0, "start 0"), (7.0, "cause")],
            0.0,
            7.0 + CAUSE_SECONDS + START_SECONDS,
            id="one never starts",
        ),
        pytest.param(
            [(0.0, "start 0"), (1.0, "start 0"), (7.0, "cause")],
            0.0,
            7.0 + CAUSE_SECONDS + START_SECONDS,
            id="one that tells twice is still one",
        ),
        pytest.param(
            [(0.0, "start 0"), (7.0, "cause"), (9.0, "start 1")],
            0.0,
            9.0 + CAUSE_SECONDS,
            id="one starts late, and may fail alike",
        ),
        pytest.param(
            [(0.0, "start 0"), (7.0, "echo"), (7.1, "start 1")],
            0.0,
            7.0 + ECHO_SECONDS,
            id="a late start does not shorten the wait for a cause",
        ),
        pytest.param(
            [*ALL_STARTED, (7.0, "cause")],
            20.0,
            27.0 + CAUSE_SECONDS,
            id="another judge comes first",
        ),
        pytest.param(
            [(0.0, "start 0"), (7.0, "cause"), (9.0, "start 1")],
            20.0,
            29.0 + CAUSE_SECONDS,
            id="another judge comes first, and a late start",
        ),
    ],
)
def test_it_is_over_at_that_time_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
    events: list[tuple[float, str]],
    patience: float,
    over: float,
) -> None:
    timeline = Timeline(patience, monkeypatch)
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
