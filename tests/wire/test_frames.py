"""Somebody on the path between a node and the driver changes what they send to each other."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from support.hubs import SECRET, SOON, Call, link, stranger, without_heartbeats

from distributor.wire import protocol
from distributor.wire.hub import Hub
from distributor.wire.messages import LOST, Heartbeat

Meddle = Callable[[list[bytes]], list[bytes]]
"""Returns what arrives instead of three frames."""


def read(sock: socket.socket, size: int) -> bytes:
    return sock.recv(size, socket.MSG_WAITALL)


def read_frame(sock: socket.socket) -> bytes:
    header = read(sock, protocol.HEADER.size)
    if not header:
        return b""
    return header + read(sock, protocol.HEADER.unpack(header)[0] + protocol.TAG_SIZE)


def is_heartbeat(frame: bytes) -> bool:
    payload = frame[protocol.HEADER.size : -protocol.TAG_SIZE]
    return isinstance(protocol.decode(payload), Heartbeat)


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class Path:
    """A connection between a link and a hub on which the frames of one side are changed."""

    def __init__(self, hub: Hub) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._far = stranger(hub.port)
        self._relay = threading.Thread(target=self._shake_hands)
        self._relay.start()

    def _shake_hands(self) -> None:
        self._near = self._listener.accept()[0]
        self._near.sendall(read(self._far, protocol.GREETING.size))
        self._far.sendall(read(self._near, protocol.HELLO.size))
        self._near.sendall(read(self._far, protocol.WELCOME.size))

    def meddle(self, meddle: Meddle, *, upward: bool) -> None:
        """Pass on three frames of one side as changed, and then everything."""
        self._relay.join(SOON)
        source, sink = (self._near, self._far) if upward else (self._far, self._near)
        found: list[bytes] = []
        back = threading.Thread(target=pass_on, args=(sink, source), daemon=True)
        back.start()
        while len(found) < 3:
            frame = read_frame(source)
            (sink.sendall if is_heartbeat(frame) else found.append)(frame)
        with contextlib.suppress(OSError):
            sink.sendall(b"".join(meddle(found)))
        pass_on(source, sink)
        back.join(SOON)

    def close(self) -> None:
        self._relay.join(SOON)
        for sock in (self._near, self._far, self._listener):
            sock.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("127.0.0.1", SECRET) as hub:
        yield hub


def changed(frames: list[bytes]) -> list[bytes]:
    payload = bytearray(frames[1])
    payload[-protocol.TAG_SIZE - 3] ^= 1
    return [frames[0], bytes(payload), frames[2]]


def repeated(frames: list[bytes]) -> list[bytes]:
    return [frames[0], frames[0], *frames[1:]]


def omitted(frames: list[bytes]) -> list[bytes]:
    return [frames[0], frames[2]]


def inserted(frames: list[bytes]) -> list[bytes]:
    pickled = pickle.dumps(Call(os.mkdir, "unpickled"))
    header = protocol.HEADER.pack(protocol.HEADER.size + len(pickled))
    forged = header + protocol.HEADER.pack(len(pickled)) + pickled + bytes(protocol.TAG_SIZE)
    return [frames[0], forged, *frames[1:]]


def shortened(frames: list[bytes]) -> list[bytes]:
    """Move the end of the second frame, so that the third begins inside of it."""
    (size,) = protocol.HEADER.unpack(frames[1][: protocol.HEADER.size])
    return [frames[0], protocol.HEADER.pack(size - 1) + frames[1][protocol.HEADER.size :]]


@pytest.mark.parametrize("meddle", [changed, repeated, omitted, inserted, shortened])
@pytest.mark.parametrize("upward", [True, False], ids=["to the driver", "to the node"])
def test_nothing_is_accepted_but_what_was_sent_next(
    hub: Hub,
    meddle: Meddle,
    upward: bool,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    found: queue.SimpleQueue[object] = queue.SimpleQueue()
    note, lost = without_heartbeats(found.put), lambda: found.put("lost")
    with contextlib.closing(Path(hub)) as path, link(path.port, 3, note, lost) as node:
        for message in ("first", "second", "third"):
            node.send(message) if upward else hub.send(3, message)
        meddling = threading.Thread(target=path.meddle, args=[meddle], kwargs={"upward": upward})
        meddling.start()
        if upward:
            assert [hub.get(SOON), hub.get(SOON)] == [(3, "first"), (3, LOST)]
        else:
            assert [found.get(timeout=SOON), found.get(timeout=SOON)] == ["first", "lost"]
        meddling.join(SOON)
    [record] = caplog.records
    assert re.match("the link (of node 3|to the driver) is closed: ", record.getMessage())
    assert os.listdir(tmp_path) == []


def test_a_buffer_in_a_message_is_not_copied_and_arrives(hub: Hub) -> None:
    data = os.urandom(3 * 2**20)
    for buffer in (data, memoryview(data), b""):
        frame = protocol.encode(pickle.PickleBuffer(buffer))
        assert len(frame) == 2
        assert len(frame[0]) < 100
    with link(hub.port, 1) as node:
        node.send(("before", pickle.PickleBuffer(memoryview(data))))
        assert hub.get(SOON) == (1, ("before", data))
