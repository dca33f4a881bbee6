"""A node goes on for as long as somebody listens at the driver's address, and no longer."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator

import pytest

from distributor.node.spark_task.driver_lease import DriverLease
from distributor.wire import protocol

SOON = 10.0
LOOKS = 3


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(protocol, "LEASE_SECONDS", 0.2)


@pytest.fixture
def driver() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON)
        yield listener


Begin = Callable[[tuple[str, int]], "tuple[DriverLease, queue.SimpleQueue[str]]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    begun: list[DriverLease] = []

    def make(hub: tuple[str, int]) -> tuple[DriverLease, queue.SimpleQueue[str]]:
        expired: queue.SimpleQueue[str] = queue.SimpleQueue()
        lease = DriverLease(hub, expired.put)
        begun.append(lease)
        lease.start()
        return lease, expired

    yield make
    for lease in begun:
        lease.close()


@pytest.mark.parametrize("link_lost", [False, True])
def test_who_listens_need_not_speak(driver: socket.socket, begin: Begin, link_lost: bool) -> None:
    lease, expired = begin(driver.getsockname())
    if link_lost:
        lease.link_lost()
    for _ in range(LOOKS):  # each of them is one that asks whether somebody is there
        driver.accept()[0].close()
    assert expired.empty()
    driver.close()
    assert expired.get(timeout=SOON) == "The driver has gone"


def test_a_driver_that_has_gone_is_noticed_as_the_link_is_lost(
    driver: socket.socket, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEARTBEAT_SECONDS", 2 * SOON)
    lease, expired = begin(driver.getsockname())
    driver.close()
    lease.link_lost()
    assert expired.get(timeout=SOON) == "The driver has gone"


def test_a_driver_that_cannot_be_reached_is_given_up(begin: Begin) -> None:
    _, expired = begin(("127.255.255.255", 9))  # which is no host's
    assert "could not be reached" in expired.get(timeout=SOON)


def test_what_is_closed_never_expires(driver: socket.socket, begin: Begin) -> None:
    lease, expired = begin(driver.getsockname())
    driver.accept()[0].close()
    lease.close()
    lease._thread.join(SOON)
    assert not lease._thread.is_alive()
    driver.close()
    lease.link_lost()
    assert expired.empty()
