"""Blocks over real sockets: from memory, from a node that still receives, after a loss."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from support.hubs import MIB, SECRET, SOON, link, stranger

from distributor.wire import transfer
from distributor.wire.hub import Hub
from distributor.wire.protocol import HandshakeRefused
from distributor.wire.transfer import (
    CHUNK,
    ArrivingBlock,
    BlockServer,
    MemoryBlock,
    block_secret,
    digest,
    receive,
)

BLOCK_SECRET = block_secret(SECRET)
PIECES = [os.urandom(3 * CHUNK + 7), b"", bytearray(os.urandom(5)), os.urandom(CHUNK)]
CONTENT = b"".join(PIECES)


def received(port: int, offset: int = 0, secret: bytes = BLOCK_SECRET) -> bytes:
    """Receive a block from a server on this machine."""
    found = BytesIO()
    receive(("127.0.0.1", port), secret, 0, offset, found.write)
    return found.getvalue()


@pytest.fixture
def arriving(tmp_path: Path) -> Iterator[ArrivingBlock]:
    with (tmp_path / "block").open("w+b") as file:
        yield ArrivingBlock(file, len(CONTENT))


@pytest.mark.parametrize("offset", [0, 1, 3 * CHUNK + 7, 3 * CHUNK + 9, len(CONTENT)])
def test_a_block_arrives_from_any_offset(offset: int) -> None:
    with BlockServer("127.0.0.1", BLOCK_SECRET, MemoryBlock(PIECES)) as server:
        assert received(server.port, offset) == CONTENT[offset:]


def test_the_digest_of_a_block_is_the_same_wherever_it_is(
    arriving: ArrivingBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE", CHUNK + 3)
    with arriving:
        arriving.append(memoryview(CONTENT))
    expected = digest(MemoryBlock(PIECES), len(CONTENT))
    assert digest(arriving, len(CONTENT)) == expected
    changed = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    others = [CONTENT[:-1], changed, CONTENT[CHUNK:] + CONTENT[:CHUNK]]
    assert expected not in [digest(MemoryBlock([each]), len(CONTENT)) for each in others]


def test_a_block_shares_the_port_of_the_hub_and_disturbs_no_link() -> None:
    with (
        Hub("127.0.0.1", SECRET) as hub,
        BlockServer("127.0.0.1", BLOCK_SECRET, MemoryBlock(PIECES), port=hub.port) as server,
        link(hub.port, 0) as node,
    ):
        assert server.port == hub.port
        assert received(hub.port) == CONTENT
        node.send("still here")
        assert hub.get(SOON) == (0, "still here")


def test_a_node_passes_on_what_it_has_while_the_rest_arrives(arriving: ArrivingBlock) -> None:
    parts = [memoryview(CONTENT)[: 2 * CHUNK], memoryview(CONTENT)[2 * CHUNK :]]
    has_first, found = threading.Event(), bytearray()

    def append(data: memoryview) -> None:
        found.extend(data)
        if len(found) >= len(parts[0]):
            has_first.set()

    with arriving, BlockServer("127.0.0.1", BLOCK_SECRET, arriving) as server:
        address = ("127.0.0.1", server.port)
        child = threading.Thread(
            target=receive, args=(address, BLOCK_SECRET, 1, 0, append), daemon=True
        )
        child.start()
        arriving.append(parts[0])
        assert has_first.wait(SOON), "nothing is sent before all has arrived"
        arriving.append(parts[1])
        child.join(SOON)
    assert bytes(found) == CONTENT


def test_the_rest_comes_from_elsewhere_if_a_node_ends(arriving: ArrivingBlock) -> None:
    found = bytearray()
    with BlockServer("127.0.0.1", BLOCK_SECRET, arriving) as server:
        with arriving:
            arriving.append(memoryview(CONTENT)[:CHUNK])
        receive(("127.0.0.1", server.port), BLOCK_SECRET, 1, 0, found.extend)
    assert bytes(found) == CONTENT[:CHUNK]
    with BlockServer("127.0.0.1", BLOCK_SECRET, MemoryBlock(PIECES)) as server:
        receive(("127.0.0.1", server.port), BLOCK_SECRET, 1, len(found), found.extend)
    assert bytes(found) == CONTENT


def test_only_nodes_of_the_run_receive_a_block() -> None:
    with BlockServer("127.0.0.1", BLOCK_SECRET, MemoryBlock(PIECES)) as server:
        with pytest.raises(HandshakeRefused):
            received(server.port, secret=SECRET)
        with stranger(server.port) as sock:
            sock.sendall(bytes(200))
            assert len(sock.recv(MIB)) < 200, "a greeting at most"
        assert received(server.port) == CONTENT


def test_a_receiver_that_has_stopped_reading_does_not_keep_a_server_open() -> None:
    content = bytes(64 * MIB)
    began = threading.Event()

    def stop_reading(data: memoryview) -> None:
        began.set()
        released.wait(SOON)

    released = threading.Event()
    with BlockServer("127.0.0.1", BLOCK_SECRET, MemoryBlock([content])) as server:
        address = ("127.0.0.1", server.port)
        reader = threading.Thread(
            target=receive, args=(address, BLOCK_SECRET, 0, 0, stop_reading), daemon=True
        )
        reader.start()
        assert began.wait(SOON)
    released.set()
    reader.join(SOON)
    assert not reader.is_alive(), "the connection has ended"
