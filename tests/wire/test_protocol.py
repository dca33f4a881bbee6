"""The handshake admits only peers with the secret; frames are reassembled from any chunks."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from support.hubs import SECRET, SOON, frames, greeted, read_until_closed

from distributor.wire import protocol
from distributor.wire.hub import Hub
from distributor.wire.messages import LOST

over_sockets = settings(
    max_examples=20,
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


@given(nonces, nonces, nodes, st.integers(0, 8 * protocol.HELLO.size - 1))
def test_a_hello_with_any_bit_changed_is_refused(
    ours: bytes, theirs: bytes, node: int, bit: int
) -> None:
    hello = protocol.hello(SECRET, protocol.GREETING.pack(protocol.MAGIC, ours), theirs, node)
    changed = bytearray(hello)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(protocol.HandshakeRefused):
        protocol.admit(SECRET, ours, changed)


@given(nonces, nonces, nonces, st.binary(min_size=1), nodes)
def test_a_peer_is_admitted_once_and_by_the_secret_alone(
    now: bytes, then: bytes, theirs: bytes, other: bytes, node: int
) -> None:
    greeting = protocol.GREETING.pack(protocol.MAGIC, now)
    admitted, welcome, hubs = protocol.admit(
        SECRET, now, protocol.hello(SECRET, greeting, theirs, node)
    )
    assert admitted == node
    links = protocol.check_welcome(SECRET, greeting, theirs, welcome)
    for sender, receiver in ((hubs, links), (links, hubs)):
        receiver.received.check(sender.sent.next(b"payload"), b"pay", b"load")

    assume(then != now and other != SECRET)
    replayed = protocol.hello(SECRET, protocol.GREETING.pack(protocol.MAGIC, then), theirs, node)
    of_another_run = protocol.hello(other, greeting, theirs, node)
    for refused in (replayed, of_another_run):
        with pytest.raises(protocol.HandshakeRefused):
            protocol.admit(SECRET, now, refused)


@over_sockets
@given(
    said=st.lists(messages, max_size=20),
    cuts=st.lists(st.integers(0, 10**6), max_size=30),
    lost=st.one_of(st.just(0), st.integers(0, 10**6)),
)
def test_complete_frames_arrive_in_order_however_a_stream_is_cut(
    hub: Hub, said: list[object], cuts: list[int], lost: int
) -> None:
    node = next(_numbers)
    sock, greeting = greeted(hub.port)
    nonce = os.urandom(protocol.NONCE_SIZE)
    sent = frames(greeting, said, nonce)
    stream = b"".join(sent)
    kept = stream[: len(stream) - lost % (len(stream) + 1)]
    whole = sum(end <= len(kept) for end in itertools.accumulate(map(len, sent)))
    with sock:
        send_in_pieces(sock, protocol.hello(SECRET, greeting, nonce, node) + kept, cuts)
        sock.shutdown(socket.SHUT_WR)
        read_until_closed(sock)  # to close with the welcome unread would discard what was sent
    received = [hub.get(SOON) for _ in range(whole + 1)]
    assert received == [*((node, message) for message in said[:whole]), (node, LOST)]


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
