"""Values that come to a driver with so much memory and no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributor.launch.spark.monitor import value_receiver as arrivals_module
from distributor.launch.spark.monitor.value_receiver import ValueReceiver
from distributor.wire.messages import ValuePart, ValueReceived, ValueRefused, ValueStart

ROOM = 100


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[ValueReceiver]:
    monkeypatch.setattr(arrivals_module, "free_memory", lambda: ROOM)
    arrivals = ValueReceiver()
    yield arrivals
    arrivals.close()


def test_a_value_is_here_with_its_last_part(arrivals: ValueReceiver) -> None:
    assert arrivals.start(ValueStart(3, 5)) is None
    assert arrivals.take(ValuePart(3, b"abc")) is None
    assert not arrivals.values
    assert arrivals.take(ValuePart(3, b"de")) == ValueReceived(3)
    with arrivals.values[3].file as file:
        file.seek(0)
        assert file.read() == b"abcde"


def test_what_is_on_its_way_has_its_room(arrivals: ValueReceiver) -> None:
    assert arrivals.start(ValueStart(0, 60)) is None
    assert arrivals.start(ValueStart(1, 60)) == ValueRefused(1, 40)
    assert arrivals.take(ValuePart(1, b"a" * 60)) is None
    assert not arrivals.values
    assert arrivals.start(ValueStart(2, 40)) is None


def test_the_room_of_nothing_is_nothing(arrivals: ValueReceiver) -> None:
    assert arrivals.start(ValueStart(0, 100)) is None
    assert arrivals.start(ValueStart(1, 1)) == ValueRefused(1, 0)
