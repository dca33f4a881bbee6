"""A node goes on for as long as its driver listens at the hub's address, and no longer."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from support.hubs import SECRET

from distributor.wire import protocol
from distributor.wire import tcp_link as driver_lease
from distributor.wire.hub import Hub
from distributor.wire.tcp_link import DriverLease

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
        lease = DriverLease(hub, SECRET, expired.put)
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
    with contextlib.ExitStack() as held:  # the kernel accepts, and nobody answers
        for _ in range(NUM_CHECKS):  # each check connects
            held.enter_context(driver.accept()[0])
        time.sleep(2 * protocol.DRIVER_LEASE_SECONDS)
        assert expired.empty()
        driver.close()
        assert expired.get(timeout=SOON) == "The driver is gone"


@pytest.mark.parametrize("link_lost", [False, True])
def test_a_driver_that_serves_the_run_is_alive(start_lease: StartLease, link_lost: bool) -> None:
    with Hub("127.0.0.1", SECRET) as hub, Hub("127.0.0.1", b"another run", port=hub.port):
        lease, expired = start_lease(("127.0.0.1", hub.port))
        if link_lost:
            lease.link_lost()
        time.sleep(3 * protocol.DRIVER_LEASE_SECONDS)
        assert expired.empty()
        assert hub.nodes() == set()
        assert hub.get(0) is None, "a question is no message"
        hub.close()  # the run has ended; the driver and its port have not
        assert expired.get(timeout=SOON) == "The driver is gone"


@pytest.mark.parametrize("link_lost", [False, True])
def test_a_new_driver_at_the_port_does_not_keep_the_ranks_of_an_old_one(
    start_lease: StartLease, monkeypatch: pytest.MonkeyPatch, link_lost: bool
) -> None:
    monkeypatch.setattr(protocol, "DRIVER_LEASE_SECONDS", 2 * SOON)
    with Hub("127.0.0.1", b"the new driver's run") as hub:
        lease, expired = start_lease(("127.0.0.1", hub.port))
        if link_lost:
            lease.link_lost()
        assert expired.get(timeout=SOON) == "The driver is gone"


def test_an_impostor_at_the_port_is_no_driver(
    driver: socket.socket, start_lease: StartLease
) -> None:
    lease, expired = start_lease(driver.getsockname())
    lease.link_lost()
    with driver.accept()[0] as sock:
        sock.sendall(protocol.GREETING.pack(protocol.MAGIC, bytes(32)) + bytes(32))
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
