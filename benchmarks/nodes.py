"""Many nodes in one process, as light as they can be: ``python -m benchmarks.nodes``.

Each speaks what a real node speaks with the driver's hub, over a connection of its own, but starts
no ranks. What to do comes as JSON on stdin, and what befell the nodes goes to stdout as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass

from distributor.wire import protocol
from distributor.wire.messages import (
    NodeDone,
    NodeUp,
    Output,
    RanksStarted,
    Release,
    Rendezvous,
    RendezvousThroughSpark,
)

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 5.0
"""As long as a real node tries to connect."""
READY = "ready"
LINES_PER_FRAME = 10


@dataclass(frozen=True)
class Orders:
    """What nodes are to do.

    Parameters
    ----------
    port : int
        Where the hub listens.
    secret : str
        Its secret; without one the nodes speak with a bare socket server.
    first, count : int
        Which nodes these are.
    lines : int
        What each prints.
    """

    port: int
    secret: str
    first: int
    count: int
    lines: int = 0


@dataclass
class Fate:
    """What befell one node, in seconds of the system's monotonic clock."""

    met: float = 0.0
    released: float = 0.0
    through_spark: bool = False
    refused: bool = False


async def run(orders: Orders) -> list[Fate]:
    """Be all nodes at once."""
    live = _node if orders.secret else _bare
    return await asyncio.gather(*(live(orders, orders.first + i) for i in range(orders.count)))


async def _node(orders: Orders, number: int) -> Fate:
    fate = Fate()
    try:
        reader, writer = await asyncio.wait_for(_linked(orders, number), CONNECT_SECONDS)
    except OSError:
        fate.refused = True
        return fate
    _send(writer, NodeUp(f"host{number}", {}))
    if number == 0:
        _send(writer, Rendezvous(LOOPBACK, 1))
    answer = await _told(reader, Rendezvous, RendezvousThroughSpark)
    fate.through_spark = isinstance(answer, RendezvousThroughSpark)
    fate.met = time.monotonic()
    _send(writer, RanksStarted())
    for start in range(0, orders.lines, LINES_PER_FRAME):
        text = b"".join(b"node %d, line %d\n" % (number, start + i) for i in range(LINES_PER_FRAME))
        _send(writer, Output(number, "stdout", text))
    _send(writer, NodeDone())
    if not fate.through_spark:
        await _told(reader, Release)
        fate.released = time.monotonic()
    writer.close()
    return fate


async def _linked(orders: Orders, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    secret = orders.secret.encode()
    reader, writer = await asyncio.open_connection(LOOPBACK, orders.port)
    greeting = await reader.readexactly(protocol.GREETING.size)
    nonce = os.urandom(protocol.NONCE_SIZE)
    writer.write(protocol.hello(secret, greeting, nonce, number))
    welcome = await reader.readexactly(protocol.WELCOME.size)
    protocol.check_welcome(secret, greeting, nonce, welcome)
    return reader, writer


def _send(writer: asyncio.StreamWriter, message: object) -> None:
    writer.write(protocol.encode(message))


async def _told(reader: asyncio.StreamReader, *kinds: type) -> object:
    (length,) = protocol.HEADER.unpack(await reader.readexactly(protocol.HEADER.size))
    message = protocol.decode(await reader.readexactly(length))
    if not isinstance(message, kinds):
        raise RuntimeError(f"the driver said {message}")
    return message


async def _bare(orders: Orders, number: int) -> Fate:
    """Hear a byte, say one, and hear another."""
    fate = Fate()
    reader, writer = await asyncio.open_connection(LOOPBACK, orders.port)
    await reader.readexactly(1)
    fate.met = time.monotonic()
    writer.write(b"d")
    await reader.readexactly(1)
    fate.released = time.monotonic()
    writer.close()
    return fate


def main() -> None:
    """Say that this process is there; do what is asked, and tell, until nothing is."""
    print(READY, flush=True)
    for line in sys.stdin:
        fates = asyncio.run(run(Orders(**json.loads(line))))
        print(json.dumps([asdict(fate) for fate in fates]), flush=True)


if __name__ == "__main__":
    main()
