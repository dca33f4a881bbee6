"""The handshake admits only peers with the secret; frames are reassembled from any chunks."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.hubs import SECRET, SOON, frames, greeted, read_until_closed

from distributor.wire import protocol
from distributor.wire.hub import LOST, Hub

over_sockets = settings(
    max_examples=60,
    phases=set(Phase) - {Phase.shrink, Phase.explain},  # a failure may take as long as a deadline
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
nonces = st.binary(min_size=protocol.NONCE_SIZE, max_size=protocol.NONCE_SIZE)
nodes = st.integers(0, 2**32 - 1)
messages = st.one_of(st.none(), st.integers(), st.text(max_size=200), st.binary(max_size=5000))
_numbers = itertools.count()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub("127.0.0.1", SECRET) as hub:
        yield hub


def send_in_pieces(sock: socket.socket, data: bytes, cuts: list[int]) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    for start, end in itertools.pairwise(places):
        sock.sendall(data[start:end])


@given(nonces, nonces, nodes)
def test_a_peer_with_the_secret_is_admitted(ours: bytes, theirs: bytes, node: int) -> None:
    greeting = protocol.GREETING.pack(protocol.MAGIC, ours)
    hello = protocol.hello(SECRET, greeting, theirs, node)
    admitted, welcome, hubs = protocol.admit(SECRET, ours, hello)
    assert admitted == node
    links = protocol.check_welcome(SECRET, greeting, theirs, welcome)
    for sender, receiver in ((hubs, links), (links, hubs)):
        receiver.received.check(sender.sent.next(b"payload"), b"pay", b"load")


@given(nonces, nonces, nodes, st.integers(0, 8 * protocol.HELLO.size - 1))
def test_a_hello_with_any_bit_changed_is_refused(
    ours: bytes, theirs: bytes, node: int, bit: int
) -> None:
    hello = protocol.hello(SECRET, protocol.GREETING.pack(protocol.MAGIC, ours), theirs, node)
    changed = bytearray(hello)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(protocol.HandshakeRefused):
        protocol.admit(SECRET, ours, changed)


@given(nonces, nonces, nonces, nodes)
def test_a_replayed_hello_is_refused(then: bytes, now: bytes, theirs: bytes, node: int) -> None:
    recorded = protocol.hello(SECRET, protocol.GREETING.pack(protocol.MAGIC, then), theirs, node)
    if then == now:
        return
    with pytest.raises(protocol.HandshakeRefused):
        protocol.admit(SECRET, now, recorded)


@given(nonces, nonces, st.binary(min_size=1), nodes)
def test_another_secret_is_refused(ours: bytes, theirs: bytes, other: bytes, node: int) -> None:
    if other == SECRET:
        return
    greeting = protocol.GREETING.pack(protocol.MAGIC, ours)
    with pytest.raises(protocol.HandshakeRefused):
        protocol.admit(SECRET, ours, protocol.hello(other, greeting, theirs, node))


@over_sockets
@given(said=st.lists(messages, max_size=20), cuts=st.lists(st.integers(0, 10**6), max_size=30))
def test_frames_arrive_whole_and_in_order(hub: Hub, said: list[object], cuts: list[int]) -> None:
    node = next(_numbers)
    sock, greeting = greeted(hub.port)
    with sock:
        nonce = os.urandom(protocol.NONCE_SIZE)
        hello = protocol.hello(SECRET, greeting, nonce, node)
        send_in_pieces(sock, hello + b"".join(frames(greeting, said, nonce)), cuts)
        received = [hub.get(SOON) for _ in said]
    assert received == [(node, message) for message in said]
    assert hub.get(SOON) == (node, LOST)


@over_sockets
@given(said=st.lists(messages, min_size=1, max_size=5), lost=st.integers(1, 10**6))
def test_complete_frames_of_a_truncated_stream_arrive(
    hub: Hub, said: list[object], lost: int
) -> None:
    node = next(_numbers)
    sock, greeting = greeted(hub.port)
    nonce = os.urandom(protocol.NONCE_SIZE)
    sent = frames(greeting, said, nonce)
    stream = b"".join(sent)
    kept = stream[: -(lost % len(stream)) or None][:-1]
    whole = sum(end <= len(kept) for end in itertools.accumulate(map(len, sent)))
    with sock:
        sock.sendall(protocol.hello(SECRET, greeting, nonce, node) + kept)
        sock.shutdown(socket.SHUT_WR)
        read_until_closed(sock)  # to close with the welcome unread would discard what was sent
    received = [hub.get(SOON) for _ in range(whole + 1)]
    assert received == [*((node, message) for message in said[:whole]), (node, LOST)]


@over_sockets
@given(said=st.binary(max_size=3000))
def test_unauthenticated_bytes_are_ignored(hub: Hub, said: bytes) -> None:
    sock, _ = greeted(hub.port)
    with sock, contextlib.suppress(ConnectionError):
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        read_until_closed(sock)
    assert hub.get(0) is None
    assert hub.nodes() == set()


@over_sockets
@given(length=st.one_of(st.just(0), st.integers(protocol.MAX_FRAME + 1, 2**32 - 1)))
def test_a_frame_of_invalid_length_ends_only_its_connection(hub: Hub, length: int) -> None:
    node = next(_numbers)
    sock, greeting = greeted(hub.port)
    with sock, contextlib.suppress(ConnectionError):
        sock.sendall(protocol.hello(SECRET, greeting, os.urandom(protocol.NONCE_SIZE), node))
        sock.recv(protocol.WELCOME.size, socket.MSG_WAITALL)
        sock.sendall(protocol.HEADER.pack(length))
        read_until_closed(sock)  # heartbeats, until the hub has closed the connection
    assert hub.get(SOON) == (node, LOST)
