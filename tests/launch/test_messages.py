"""Messages to the user: through logging or on stderr, with correct plurals."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.driver_output import DriverOutput

import distributor
from distributor.core.text import counted, listed
from distributor.policies.retry_policy import FailedAttempt
from distributor.screen.messages import notify, warn
from distributor.screen.run_progress import RunProgress


@pytest.fixture
def driver() -> DriverOutput:
    return DriverOutput()


NOUNS = [
    (counted(1, "rank"), "1 rank"),
    (counted(0, "rank"), "0 ranks"),
    (counted(2, "entry", "entries"), "2 entries"),
    (listed("rank", [3]), "rank 3"),
    (listed("rank", [0, 3]), "ranks 0, 3"),
    (listed("rank", [0, 1, 3, 4, 5, 6, 9]), "ranks 0, 1, 3 to 6, 9"),
    (listed("executor", ["a", "b", "c"]), "executors a, b, c"),
    (RunProgress(1).line("train").rpartition(",")[0], "train on 1 rank, 0 up"),
    (str(FailedAttempt(0, 1, KeyError("lost"))), "attempt 0 on 1 rank: KeyError: 'lost'"),
]


@pytest.mark.parametrize(("found", "expected"), NOUNS)
def test_nouns_agree_with_their_numbers(found: str, expected: str) -> None:
    assert found == expected


def test_no_message_has_an_optional_plural() -> None:
    sources = Path(distributor.__file__).parent.rglob("*.py")
    text = {path.name: re.findall(r"\w+\(s\)", path.read_text()) for path in sources}
    assert {name: found for name, found in text.items() if found} == {}


@pytest.mark.parametrize(
    ("level", "handled", "logged"),
    [
        (logging.NOTSET, False, False),
        (logging.INFO, False, False),
        (logging.WARNING, True, False),
        (logging.INFO, True, True),
        (logging.DEBUG, True, True),
    ],
)
def test_notify(
    driver: DriverOutput, monkeypatch: pytest.MonkeyPatch, level: int, handled: bool, logged: bool
) -> None:
    log, logger = io.StringIO(), logging.getLogger("distributor")
    monkeypatch.setattr(logger, "propagate", False)  # not to the handlers of pytest
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)  # so that both are restored
    monkeypatch.setattr(logger, "_cache", {})
    logger.setLevel(level)
    if handled:
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s %(message)s"))
        logger.addHandler(handler)
    before = (logger.level, list(logger.handlers), logger.propagate, logging.root.level)
    with driver.here():
        notify("Started 100% of 2 processes")
    assert driver.err() == ("" if logged else "Started 100% of 2 processes\n")
    record = "INFO test_messages.py Started 100% of 2 processes\n"
    assert log.getvalue() == (record if logged else "")
    assert (logger.level, logger.handlers, logger.propagate, logging.root.level) == before


def test_warn(warned: Callable[[], list[str]]) -> None:
    warn("The link is 50% down")
    assert warned() == ["The link is 50% down"]
