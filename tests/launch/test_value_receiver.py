"""Values that a driver with little memory receives or refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributor.launch.spark.monitor import value_receiver as module
from distributor.launch.spark.monitor.value_receiver import ValueReceiver
from distributor.wire.messages import ValuePart, ValueReceived, ValueRefused, ValueStart

ROOM = 100
"""Bytes of memory that the driver has free."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ValueReceiver]:
    monkeypatch.setattr(module, "free_memory", lambda: ROOM)
    receiver = ValueReceiver()
    yield receiver
    receiver.close()


def test_a_value_is_complete_with_its_last_part(receiver: ValueReceiver) -> None:
    assert receiver.start(ValueStart(3, 5)) is None
    assert receiver.take(ValuePart(3, b"abc")) is None
    assert not receiver.values
    assert receiver.take(ValuePart(3, b"de")) == ValueReceived(3)
    with receiver.values[3].file as file:
        file.seek(0)
        assert file.read() == b"abcde"


def test_memory_is_reserved_for_values_that_have_begun(receiver: ValueReceiver) -> None:
    assert receiver.start(ValueStart(0, 60)) is None
    assert receiver.start(ValueStart(1, 60)) == ValueRefused(1, 40)
    assert receiver.take(ValuePart(1, b"a" * 60)) is None
    assert not receiver.values
    assert receiver.start(ValueStart(2, 40)) is None


def test_no_memory_is_left_beside_a_value_that_takes_it_all(receiver: ValueReceiver) -> None:
    assert receiver.start(ValueStart(0, 100)) is None
    assert receiver.start(ValueStart(1, 1)) == ValueRefused(1, 0)
