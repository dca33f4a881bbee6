"""Polling: what is shown while it waits, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.waiting import SOON

from distributor.control import polling
from distributor.control.cancellation import Cancellation
from distributor.control.polling import Reminder, poll_until
from distributor.errors import RunCancelled


@pytest.fixture(autouse=True)
def without_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "REMINDER_SECONDS", 0.0)
    monkeypatch.setattr(polling, "POLL_SECONDS", 0.001)


def obstacles(count: int) -> Iterator[int | None]:
    yield from range(count, 0, -1)
    yield None


def soon() -> float:
    return time.monotonic() + SOON


def test_it_ends_when_nothing_is_obstacles(capsys: pytest.CaptureFixture[str]) -> None:
    assert poll_until(obstacles(3).__next__, soon(), Cancellation()) is None
    assert capsys.readouterr().err == ""


def test_the_obstacle_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    next_obstacle = obstacles(3).__next__
    poll_until(next_obstacle, soon(), Cancellation(), lambda left: f"{left} are here.")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("Waiting: ")[2] for line in lines] == [
        f"{n} are here." for n in (3, 2, 1)
    ]


def test_a_message_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    found = iter([2, 2, 2, 1, 1, None])
    poll_until(lambda: next(found), soon(), Cancellation(), lambda left: f"{left} are here.")
    assert capsys.readouterr().err == "Waiting: 2 are here.\nWaiting: 1 are here.\n"


def test_the_intervals_between_messages_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "REMINDER_SECONDS", 5.0)
    now = 0
    reminder, shown_at = Reminder(lambda: now), []
    for now in range(300):
        if reminder.due():
            shown_at.append(now)
    assert shown_at == [5, 15, 35, 75, 135, 195, 255]


@pytest.mark.parametrize("left", [0, 3])
def test_it_returns_the_obstacle_at_the_deadline(left: int) -> None:
    """An obstacle may be 0: there are no slots."""
    assert poll_until(lambda: left, time.monotonic(), Cancellation()) == left


def test_a_run_that_is_cancelled_does_not_wait() -> None:
    cancellation = Cancellation()
    cancellation.request()
    with pytest.raises(RunCancelled):
        poll_until(lambda: 1, soon(), cancellation)
