"""Several runs of one process share a port; each has its own nodes, secret, queue and end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from support.hubs import FLOOD, MIB, SECRET, SOON, link, read_until_closed, within
from support.waiting import until

from distributor.wire import protocol
from distributor.wire.hub import Hub
from distributor.wire.messages import LOST, SILENT

OTHER = b"a secret of another run"


@pytest.fixture
def hubs() -> Iterator[tuple[Hub, Hub]]:
    with Hub("127.0.0.1", SECRET) as one, Hub("127.0.0.1", OTHER, port=one.port) as other:
        yield one, other


def listener_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distributor-hub"]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_runs_at_one_port_have_separate_nodes(hubs: tuple[Hub, Hub]) -> None:
    one, other = hubs
    received: list[object] = []
    assert one.port == other.port
    assert len(listener_threads()) == 1
    with (
        link(one.port, 0) as node_of_one,
        link(other.port, 0, received.append, secret=OTHER) as node,
    ):
        node_of_one.send("to one")
        node.send("to other")
        assert one.get(SOON) == (0, "to one")
        assert other.get(SOON) == (0, "to other")
        one.broadcast("not for the other's nodes")
        other.broadcast("from other")
        until(lambda: received, "it arrives")
        assert received == ["from other"]
    assert (one.get(SOON), other.get(SOON)) == ((0, LOST), (0, LOST))
    assert one.get(0) is other.get(0) is None


def test_a_secret_and_a_port_that_are_taken_are_refused(hubs: tuple[Hub, Hub]) -> None:
    with Hub("localhost", b"a third secret") as third:
        assert third.port == hubs[0].port
        assert len(listener_threads()) == 1
    with pytest.raises(ValueError, match="same secret"):
        Hub("127.0.0.1", SECRET)
    for hub in hubs:
        hub.close()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        Hub("127.0.0.1", SECRET, port=taken.getsockname()[1])
    assert listener_threads() == []


def test_the_secret_of_one_run_does_not_admit_to_another(hubs: tuple[Hub, Hub]) -> None:
    one, other = hubs
    with socket.create_connection(("127.0.0.1", one.port), SOON) as sock:
        greeting = sock.recv(protocol.GREETING.size, socket.MSG_WAITALL)
        hello = protocol.hello(OTHER, greeting, bytes(32), 0)
        sock.sendall(protocol.run_key(SECRET) + hello[protocol.KEY_SIZE :])
        assert read_until_closed(sock) == b"", "no welcome"
    with pytest.raises(protocol.HandshakeRefused, match="hung up"):
        link(one.port, secret=b"no run's secret")
    assert one.nodes() == other.nodes() == set()


def test_a_run_that_ends_leaves_the_port_open_for_others() -> None:
    one = Hub("127.0.0.1", SECRET)
    with Hub("127.0.0.1", OTHER, port=one.port) as other, link(other.port, 1, secret=OTHER) as node:
        lost = threading.Event()
        with link(one.port, 0, on_lost=lost.set), within(SOON / 2):
            one.close()
            assert lost.wait(SOON)
        one.close()  # closing again has no effect
        with pytest.raises(protocol.HandshakeRefused):
            link(one.port)
        node.send("still here")
        assert other.get(SOON) == (1, "still here")
    assert listener_threads() == []
    assert not listens(one.port)


def test_a_run_that_reads_nothing_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(protocol, "NODE_LEASE_SECONDS", 0.5)
    beats: list[object] = []
    with (
        Hub("127.0.0.1", SECRET) as slow,
        Hub("127.0.0.1", OTHER) as other,
        link(other.port, 2, beats.append, secret=OTHER) as node,
    ):
        flood = link(slow.port, 1)
        for _ in range(FLOOD):
            flood.send(bytes(MIB))
        until(lambda: slow._held_back, "the hub holds back")
        before = len(beats)
        # This is longer than the lease of a silent node.
        until(lambda: len(beats) > before + 20, "heartbeats go on")
        assert other.nodes() == {2}
        node.send(bytes(MIB))
        assert other.get(SOON) == (2, bytes(MIB))
        with socket.create_connection(("127.0.0.1", other.port), SOON) as mute:
            greeting = mute.recv(protocol.GREETING.size, socket.MSG_WAITALL)
            mute.sendall(protocol.hello(OTHER, greeting, bytes(32), 3))
            assert [other.get(SOON), other.get(SOON)] == [(3, SILENT), (3, LOST)]
        assert slow.nodes() == {1}, "unread messages are no silence"
        flood.close(timeout=0.3)
