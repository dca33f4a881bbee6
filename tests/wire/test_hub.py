"""A hub and its links over real sockets, with refused, stuck and flooding peers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.hubs import (
    FLOOD,
    MIB,
    SECRET,
    SOON,
    Call,
    frames,
    greeted,
    link,
    read_until_closed,
    stranger,
    within,
    without_heartbeats,
)
from support.waiting import until

from distributor.wire import protocol
from distributor.wire.hub import Hub
from distributor.wire.messages import LOST, SILENT


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("127.0.0.1", SECRET) as hub:
        yield hub


def proven(hub: Hub, node: int) -> socket.socket:
    """Return a connection after a complete handshake; nothing answers its heartbeats."""
    return with_greeting(hub, node)[0]


def with_greeting(hub: Hub, node: int) -> tuple[socket.socket, bytes]:
    """Return a connection after a complete handshake with a nonce of zeros, and its greeting."""
    sock, greeting = greeted(hub.port)
    sock.sendall(protocol.hello(SECRET, greeting, bytes(32), node))
    protocol.check_welcome(SECRET, greeting, bytes(32), sock.recv(32, socket.MSG_WAITALL))
    return sock, greeting


def assert_serves(hub: Hub, node: int = 77) -> None:
    """Check that a new node is served, and that the queue holds only its events."""
    with link(hub.port, node) as newcomer:
        newcomer.send("hello")
        assert hub.get(SOON) == (node, "hello")
    assert hub.get(SOON) == (node, LOST)


def test_messages_arrive_in_order_in_both_directions(hub: Hub) -> None:
    received: list[object] = []
    with link(hub.port, 3, without_heartbeats(received.append)) as three, link(hub.port, 4) as four:
        assert hub.nodes() == {3, 4}
        for number in range(1000):
            three.send(("up", number))
            hub.send(3, ("down", number))
            hub.send(5, "nobody is there")
        hub.broadcast("all")
        assert [hub.get(SOON) for _ in range(1000)] == [(3, ("up", n)) for n in range(1000)]
        until(lambda: len(received) == 1001, "all arrive")
        assert received == [*(("down", n) for n in range(1000)), "all"]
        four.send(b"x" * (20 * MIB))
        assert hub.get(SOON) == (4, b"x" * (20 * MIB))
        with pytest.raises(protocol.FrameTooLarge):
            four.send(bytes(protocol.MAX_FRAME))


def test_each_side_refuses_a_wrong_secret(hub: Hub) -> None:
    with pytest.raises(protocol.HandshakeRefused, match="hung up"):
        link(hub.port, secret=b"another")
    assert hub.nodes() == set()
    assert_serves(hub)
    for magic, reason in ((protocol.MAGIC, "does not hold"), (b"another protocol", "not a dist")):
        with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
            impostor.settimeout(SOON)
            refused = pool.submit(link, impostor.getsockname()[1])
            with impostor.accept()[0] as sock:
                sock.sendall(protocol.GREETING.pack(magic, bytes(32)) + bytes(32))
                with pytest.raises(protocol.HandshakeRefused, match=reason):
                    refused.result(SOON)


def test_an_authenticated_peer_whose_message_cannot_be_unpickled_is_dropped(hub: Hub) -> None:
    with link(hub.port, 1) as good:
        bad, greeting = with_greeting(hub, 2)
        bad.sendall(b"".join(frames(greeting, ["fine", Call(int, "no number"), "more"])))
        assert [hub.get(SOON), hub.get(SOON)] == [(2, "fine"), (2, LOST)]
        read_until_closed(bad)
        good.send("still here")
        assert hub.get(SOON) == (1, "still here")


def test_a_recorded_connection_cannot_be_replayed(hub: Hub) -> None:
    sock, greeting = greeted(hub.port)
    sent = protocol.hello(SECRET, greeting, bytes(32), 5)
    sent += b"".join(frames(greeting, ["first", Call(os.abort, ())]))
    with sock:
        sock.sendall(sent[:-40])  # of the call something is missing
        assert hub.get(SOON) == (5, "first")
    assert hub.get(SOON) == (5, LOST)
    again, other_greeting = greeted(hub.port)
    assert other_greeting != greeting
    again.sendall(sent)
    assert read_until_closed(again) == b"", "no welcome"
    assert hub.get(0) is None
    assert hub.nodes() == set()


def test_a_peer_that_answers_no_heartbeat_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(protocol, "NODE_LEASE_SECONDS", 0.5)
    with Hub("127.0.0.1", SECRET) as hub, link(hub.port, 1) as good:
        bad = proven(hub, 2)
        assert [hub.get(SOON), hub.get(SOON)] == [(2, SILENT), (2, LOST)]
        read_until_closed(bad)
        good.send("still here")
        assert hub.get(SOON) == (1, "still here")


def test_a_lost_link_reports_it_once_after_all_messages_and_discards_later_ones(hub: Hub) -> None:
    received: list[object] = []
    receive = without_heartbeats(received.append)
    with link(hub.port, 0, receive, on_lost=lambda: received.append("lost")) as lost:
        with link(hub.port, 1, on_lost=lambda: received.append("our own close")):
            pass
        hub.send(0, bytes(8 * MIB))
        hub.close()
        until(lambda: len(received) == 2, "the link is lost")
        lost.send("into the void")
        assert lost.lost
        assert lost.backlog() == 0
        assert not lost.wait_below(1, SOON)
    assert received == [bytes(8 * MIB), "lost"]


def test_unread_messages_cause_backpressure(hub: Hub) -> None:
    with link(hub.port, 1) as flood, link(hub.port, 2) as other:
        for number in range(FLOOD):
            flood.send((number, bytes(MIB)))
        until(lambda: hub._held_back, "the hub holds back")
        assert not flood.wait_below(16 * MIB, 0.5)
        assert 32 * MIB < hub._waiting < 34 * MIB
        other.send((FLOOD, "queued later"))
        events = [hub.get(SOON) for _ in range(FLOOD + 1)]
        assert sorted(message[0] for _, message in events) == list(range(FLOOD + 1))  # type: ignore
        assert flood.wait_below(1, SOON)
        assert hub._waiting < MIB, "only heartbeats may wait"


def test_a_peer_that_does_not_read_is_dropped(hub: Hub) -> None:
    with link(hub.port, 1) as good, proven(hub, 2):
        for _ in range(10):
            hub.send(2, bytes(10 * MIB))
        assert hub.get(SOON) == (2, LOST)
        good.send("still here")
        assert hub.get(SOON) == (1, "still here")


def test_closing_is_prompt_even_if_the_other_end_is_stuck(hub: Hub) -> None:
    stuck = link(hub.port, 1)
    for _ in range(FLOOD):
        stuck.send(bytes(MIB))
    until(lambda: hub._held_back, "the hub holds back")
    with within(2):
        stuck.close(timeout=0.3)
    assert stuck.lost  # because not everything was sent
    assert not [t for t in threading.enumerate() if t.name.startswith("distributor-link")]
    with stranger(hub.port), proven(hub, 2), within(3):
        hub.send(2, bytes(30 * MIB))
        hub.close()


def test_a_wait_ends_if_a_signal_is_handled_meanwhile(hub: Hub) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.2))
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        assert hub.get(0.1) is None
    finally:
        signal.signal(signal.SIGALRM, before)
