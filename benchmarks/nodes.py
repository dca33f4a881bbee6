"""Many simulated nodes in one process: ``python -m benchmarks.nodes``.

Each exchanges the messages of a real node with the driver's hub, over its own connection, but
starts no ranks. Instructions are read as JSON from stdin; results are written as JSON to stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import NamedTuple

from distributor.wire import protocol
from distributor.wire.messages import (
    Heartbeat,
    NodeDone,
    NodeUp,
    Output,
    RanksStarted,
    Release,
    Rendezvous,
    Unlink,
)
from distributor.wire.tcp_link import CONNECT_SECONDS, HANDSHAKE_SECONDS

LOOPBACK = "127.0.0.1"
READY = "ready"
LINES_PER_FRAME = 10


@dataclass(frozen=True)
class Orders:
    """Instructions for a group of nodes.

    Parameters
    ----------
    port : int
        Port of the hub.
    secret : str
        Secret of the hub; if empty, the nodes talk to a plain socket server.
    first, count : int
        Number of the first node, and how many there are.
    lines : int
        Lines that each prints.
    """

    port: int
    secret: str
    first: int
    count: int
    lines: int = 0


@dataclass
class NodeRecord:
    """What happened to one node, in seconds of the system's monotonic clock."""

    rendezvoused: float = 0.0
    released: float = 0.0
    through_spark: bool = False
    refused: bool = False


class _Link(NamedTuple):
    """An authenticated connection to the hub."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    session: protocol.Session


async def run(orders: Orders) -> list[NodeRecord]:
    """Run all nodes concurrently."""
    live = _node if orders.secret else _bare
    return await asyncio.gather(*(live(orders, orders.first + i) for i in range(orders.count)))


async def _node(orders: Orders, number: int) -> NodeRecord:
    record = NodeRecord()
    try:
        link = await _linked(orders, number)
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        record.refused = True
        return record
    _send(link, NodeUp(f"host{number}", {}))
    if number == 0:
        _send(link, Rendezvous(LOOPBACK, 1))
    answer = await _receive(link, Rendezvous, Unlink)
    record.rendezvoused = time.monotonic()
    if isinstance(answer, Unlink):
        record.through_spark = True
        link.writer.close()
        return record
    _send(link, RanksStarted())
    for start in range(0, orders.lines, LINES_PER_FRAME):
        text = b"".join(b"node %d, line %d\n" % (number, start + i) for i in range(LINES_PER_FRAME))
        _send(link, Output(number, "stdout", text))
    _send(link, NodeDone())
    await _receive(link, Release)
    record.released = time.monotonic()
    link.writer.close()
    return record


async def _linked(orders: Orders, number: int) -> _Link:
    connection = asyncio.open_connection(LOOPBACK, orders.port)
    reader, writer = await asyncio.wait_for(connection, CONNECT_SECONDS)
    handshake = _prove(orders.secret.encode(), number, reader, writer)
    return _Link(reader, writer, await asyncio.wait_for(handshake, HANDSHAKE_SECONDS))


async def _prove(
    secret: bytes, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> protocol.Session:
    greeting = await reader.readexactly(protocol.GREETING.size)
    nonce = os.urandom(protocol.NONCE_SIZE)
    writer.write(protocol.hello(secret, greeting, nonce, number))
    welcome = await reader.readexactly(protocol.WELCOME.size)
    return protocol.check_welcome(secret, greeting, nonce, welcome)


def _send(link: _Link, message: object) -> None:
    frame = protocol.encode(message)
    link.writer.writelines([*frame, link.session.sent.next(*frame)])


async def _receive(link: _Link, *kinds: type) -> object:
    """Return the next message, and answer the heartbeats before it."""
    while True:
        header = await link.reader.readexactly(protocol.HEADER.size)
        (length,) = protocol.HEADER.unpack(header)
        payload = memoryview(await link.reader.readexactly(length))
        tag = await link.reader.readexactly(protocol.TAG_SIZE)
        link.session.received.check(tag, header, payload)
        message = protocol.decode(payload)
        if isinstance(message, Heartbeat):
            _send(link, message)
        elif isinstance(message, kinds):
            return message
        else:
            raise RuntimeError(f"the driver sent {message}")


async def _bare(orders: Orders, number: int) -> NodeRecord:
    """Receive a byte, send one, and receive another."""
    record = NodeRecord()
    reader, writer = await asyncio.open_connection(LOOPBACK, orders.port)
    await reader.readexactly(1)
    record.rendezvoused = time.monotonic()
    writer.write(b"d")
    await reader.readexactly(1)
    record.released = time.monotonic()
    writer.close()
    return record


def main() -> None:
    """Announce this process; then follow instructions and print results until stdin ends."""
    print(READY, flush=True)
    for line in sys.stdin:
        fates = asyncio.run(run(Orders(**json.loads(line))))
        print(json.dumps([asdict(record) for record in fates]), flush=True)


if __name__ == "__main__":
    main()
