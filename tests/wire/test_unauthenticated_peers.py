"""A hub keeps serving its links while many unauthenticated peers connect."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import threading
from typing import Final

import pytest
from support.hubs import RESET, SECRET, SOON, link, read_until_closed, stranger
from support.waiting import until

from distributor.wire import hub as listener
from distributor.wire import protocol
from distributor.wire.hub import Hub

_PICKLE: Final = b"cos\nmkdir\n(Vunpickled\ntR."
BOMB: Final = protocol.HEADER.pack(len(_PICKLE)) + _PICKLE
"""Unpickles by making a folder in the working directory; short enough for a hello."""
BOMBS: Final = (protocol.HEADER.pack(len(BOMB)) + BOMB) * 100


def resets_the_connection(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


def is_silent(sock: socket.socket) -> None:
    pass


def uses_a_wrong_secret(sock: socket.socket) -> None:
    greeting = sock.recv(protocol.GREETING.size, socket.MSG_WAITALL)
    sock.sendall(protocol.hello(b"another secret", greeting, bytes(32), 0) + BOMBS)


def sends_garbage(sock: socket.socket) -> None:
    sock.sendall(BOMB.ljust(protocol.HELLO.size) + BOMBS)


def sends_a_partial_hello(sock: socket.socket) -> None:
    greeting = sock.recv(protocol.GREETING.size, socket.MSG_WAITALL)
    sock.sendall(protocol.hello(SECRET, greeting, bytes(32), 1)[:-1])


def announces_a_huge_frame_and_sends_more(sock: socket.socket) -> None:
    sock.sendall(b"\xff" * protocol.HEADER.size + BOMB + BOMBS)


BEHAVIOURS: Final = [
    resets_the_connection,
    is_silent,
    uses_a_wrong_secret,
    sends_garbage,
    sends_a_partial_hello,
    announces_a_huge_frame_and_sends_more,
]


def wave(port: int, size: int) -> None:
    """Connect strangers of all kinds; each must get at most the greeting and be disconnected."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger(port)) for _ in range(size)]
        for number, sock in enumerate(strangers):
            # The hub closes some connections before it has read everything.
            with contextlib.suppress(ConnectionError):
                BEHAVIOURS[number % len(BEHAVIOURS)](sock)
        for sock in strangers:
            if sock.fileno() != -1:
                assert len(read_until_closed(sock)) <= protocol.GREETING.size


def census() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_strangers_of_all_kinds_have_no_effect(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 1.0)
    monkeypatch.chdir(tmp_path)
    with Hub("127.0.0.1", SECRET) as hub, link(hub.port, on_message=lambda message: None) as node:
        until(lambda: hub.nodes() == {0}, "the node is known")
        before = census()
        for number in range(2):
            wave(hub.port, 300)
            node.send(number)
            assert hub.get(SOON) == (0, number), "and nothing else"
        until(lambda: census() == before, "nothing is left")
    assert capfd.readouterr() == ("", "")
    assert os.listdir(tmp_path) == []
    protocol.decode(BOMB)
    assert os.listdir(tmp_path) == ["unpickled"], "which the check above would have seen"
