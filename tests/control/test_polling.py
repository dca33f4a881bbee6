"""Polling: what is shown while it waits, and when it ends."""

from __future__ import annotations

import time

import pytest
from support.waiting import SOON

from distributor.control import polling
from distributor.control.cancellation import Cancellation
from distributor.control.polling import poll_until
from distributor.errors import RunCancelled


@pytest.fixture(autouse=True)
def without_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "REMINDER_SECONDS", 0.0)
    monkeypatch.setattr(polling, "POLL_SECONDS", 0.001)


def soon() -> float:
    return time.monotonic() + SOON


def test_a_message_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    found = iter([2, 2, 2, 1, 1, None])
    poll_until(lambda: next(found), soon(), Cancellation(), lambda left: f"{left} are here.")
    assert capsys.readouterr().err == "Waiting: 2 are here.\nWaiting: 1 are here.\n"


def test_it_returns_the_obstacle_at_the_deadline() -> None:
    """Also an obstacle that is 0: there are no slots."""
    assert poll_until(lambda: 0, time.monotonic(), Cancellation()) == 0


def test_a_run_that_is_cancelled_does_not_wait() -> None:
    cancellation = Cancellation()
    cancellation.request()
    with pytest.raises(RunCancelled):
        poll_until(lambda: 1, soon(), cancellation)
