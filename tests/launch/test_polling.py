"""Waiting for what Spark has no event for: what is told, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.waiting import SOON

from distributor.errors import RunCancelled
from distributor.launch.cancellation import Cancellation
from distributor.launch.spark import polling
from distributor.launch.spark.polling import Reminder, poll_until


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(polling, "LOOK_SECONDS", 0.001)


def in_the_way(count: int) -> Iterator[int | None]:
    yield from range(count, 0, -1)
    yield None


def soon() -> float:
    return time.monotonic() + SOON


def test_it_ends_when_nothing_is_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert poll_until(in_the_way(3).__next__, soon(), Cancellation()) is None
    assert capsys.readouterr().err == ""


def test_the_user_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    looks = in_the_way(3).__next__
    poll_until(looks, soon(), Cancellation(), lambda left: f"{left} are here.")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("Waiting: ")[2] for line in lines] == [
        f"{n} are here." for n in (3, 2, 1)
    ]


def test_messages_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "TELL_SECONDS", 5.0)
    now = 0
    reminder, told_at = Reminder(lambda: now), []
    for now in range(300):
        if reminder.due():
            told_at.append(now)
    assert told_at == [5, 15, 35, 75, 135, 195, 255]


@pytest.mark.parametrize("left", [0, 3])
def test_at_the_deadline_it_tells_what_is_left(left: int) -> None:
    """So also that there is room for none."""
    assert poll_until(lambda: left, time.monotonic(), Cancellation()) == left


def test_a_run_that_is_cancelled_does_not_wait() -> None:
    cancellation = Cancellation()
    cancellation.request()
    with pytest.raises(RunCancelled):
        poll_until(lambda: 1, soon(), cancellation)
