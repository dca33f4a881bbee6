"""A node goes on for as long as something listens at the driver's address, and no longer."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator

import pytest

from distributor.node.spark_task import driver_lease
from distributor.node.spark_task.driver_lease import DriverLease
from distributor.wire import protocol

SOON = 10.0
NUM_CHECKS = 3


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_lease, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(protocol, "DRIVER_LEASE_SECONDS", 0.2)


@pytest.fixture
def driver() -> Iterator[socket.socket]:
    """A socket that listens where the hub would."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON)
        yield listener


StartLease = Callable[[tuple[str, int]], "tuple[DriverLease, queue.SimpleQueue[str]]"]


@pytest.fixture
def start_lease() -> Iterator[StartLease]:
    """Start a lease on a hub; return it with a queue of the reasons for which it expires."""
    leases: list[DriverLease] = []

    def start(hub: tuple[str, int]) -> tuple[DriverLease, queue.SimpleQueue[str]]:
        expired: queue.SimpleQueue[str] = queue.SimpleQueue()
        lease = DriverLease(hub, expired.put)
        leases.append(lease)
        lease.start()
        return lease, expired

    yield start
    for lease in leases:
        lease.close()


@pytest.mark.parametrize("link_lost", [False, True])
def test_a_silent_driver_that_listens_is_alive(
    driver: socket.socket, start_lease: StartLease, link_lost: bool
) -> None:
    lease, expired = start_lease(driver.getsockname())
    if link_lost:
        lease.link_lost()
    for _ in range(NUM_CHECKS):  # each check connects
        driver.accept()[0].close()
    assert expired.empty()
    driver.close()
    assert expired.get(timeout=SOON) == "The driver is gone"


def test_a_driver_that_is_gone_is_noticed_at_once_if_the_link_is_lost(
    driver: socket.socket, start_lease: StartLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_lease, "CHECK_SECONDS", 2 * SOON)
    lease, expired = start_lease(driver.getsockname())
    driver.close()
    lease.link_lost()
    assert expired.get(timeout=SOON) == "The driver is gone"


def test_the_lease_on_an_unreachable_driver_expires(start_lease: StartLease) -> None:
    _, expired = start_lease(("127.255.255.255", 9))  # no host has this address
    assert "could not be reached" in expired.get(timeout=SOON)


def test_a_closed_lease_never_expires(driver: socket.socket, start_lease: StartLease) -> None:
    lease, expired = start_lease(driver.getsockname())
    driver.accept()[0].close()
    lease.close()
    lease._thread.join(SOON)
    assert not lease._thread.is_alive()
    driver.close()
    lease.link_lost()
    assert expired.empty()
