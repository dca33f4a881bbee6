"""Values that a driver with little memory receives or refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributor.control import outcomes as module
from distributor.control.outcomes import Outcomes
from distributor.wire.messages import ValuePart, ValueReceived, ValueRefused, ValueStart

ROOM = 100
"""Bytes of memory that the driver has free."""


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outcomes]:
    monkeypatch.setattr(module, "free_memory", lambda: ROOM)
    received = Outcomes(4)
    yield received
    received.discard_incomplete()


def test_a_value_is_complete_with_its_last_part(received: Outcomes) -> None:
    assert received.start_value(ValueStart(3, 5)) is None
    assert received.add_part(ValuePart(3, b"abc")) is None
    assert not received.values
    assert received.add_part(ValuePart(3, b"de")) == ValueReceived(3)
    with received.values[3].file as file:
        file.seek(0)
        assert file.read() == b"abcde"


def test_memory_is_reserved_for_values_that_have_begun(received: Outcomes) -> None:
    assert received.start_value(ValueStart(0, 60)) is None
    assert received.start_value(ValueStart(1, 60)) == ValueRefused(1, 40)
    assert received.add_part(ValuePart(1, b"a" * 60)) is None
    assert not received.values
    assert received.start_value(ValueStart(2, 40)) is None
    assert received.start_value(ValueStart(3, 1)) == ValueRefused(3, 0)
