"""Recordings of connections, replayed to a hub or to a link."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from support.hubs import SECRET, SOON, Call, greeted, link, read_until_closed, stranger

from distributor.wire import protocol
from distributor.wire.hub import LOST, Hub


class Recording(NamedTuple):
    """The bytes that each side of one connection sent."""

    link: bytearray
    hub: bytearray


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("127.0.0.1", SECRET) as hub:
        yield hub


def forward(source: socket.socket, sink: socket.socket, tape: bytearray) -> None:
    source.settimeout(SOON)
    deadline = time.monotonic() + SOON
    while data := source.recv(65536):
        tape += data
        sink.sendall(data)
        assert time.monotonic() < deadline, "heartbeats never end"
    sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def tapped(port: int) -> Iterator[tuple[int, Recording]]:
    """Yield the port of a proxy of the hub, for one link, and the recording of that link."""
    tape = Recording(bytearray(), bytearray())

    def relay() -> None:
        with listener.accept()[0] as near, stranger(port) as far:
            answers = pool.submit(forward, far, near, tape.hub)
            forward(near, far, tape.link)
            answers.result(SOON)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        listener.settimeout(SOON)
        relaying = pool.submit(relay)
        yield listener.getsockname()[1], tape
        relaying.result(SOON)


def record(hub: Hub, node: int, sent: list[object], expected: list[object]) -> Recording:
    """Record a complete link, of which the hub receives the `expected` messages."""
    with tapped(hub.port) as (port, tape), link(port, node) as genuine:
        for message in sent:
            genuine.send(message)
        assert [hub.get(SOON) for _ in expected] == [(node, message) for message in expected]
    assert hub.get(SOON) == (node, LOST)
    return tape


def assert_refused(hub: Hub, replay: bytes | bytearray) -> None:
    sock, greeting = greeted(hub.port)
    assert greeting.startswith(protocol.MAGIC)
    sock.sendall(replay)
    assert read_until_closed(sock) == b""
    assert hub.get(0) is None  # a message would be queued before the hub closes the connection
    assert hub.nodes() == set()


def test_a_recorded_link_cannot_be_replayed(hub: Hub, tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "mark"
    sent = ["first", Call(os.mkdir, str(mark)), "x" * 1000]
    tape = record(hub, 5, sent, ["first", None, "x" * 1000])
    hello, first_frames = tape.link[: protocol.HELLO.size], tape.link[protocol.HELLO.size :]
    assert all(b"".join(protocol.encode(message)) in first_frames for message in sent)
    mark.rmdir()  # the genuine link has made it, so a replay that is unpickled would too

    for replay in (tape.link, hello, first_frames, tape.hub, hello + hello + first_frames):
        assert_refused(hub, replay)

    assert not mark.exists()
    assert record(hub, 5, ["mine"], ["mine"]).link[: protocol.HELLO.size] != hello


def test_a_recorded_hub_cannot_be_replayed(hub: Hub) -> None:
    tape = record(hub, 5, ["first"], ["first"])
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
        impostor.settimeout(SOON)
        deceived = pool.submit(link, impostor.getsockname()[1], 5)
        with impostor.accept()[0] as sock:
            sock.sendall(tape.hub)
            with pytest.raises(protocol.HandshakeRefused, match="does not hold"):
                deceived.result(SOON)
