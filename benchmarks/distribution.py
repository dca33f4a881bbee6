"""Time for a large program to reach simulated nodes, whose network cards are slow."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.functions import MEGABYTE
from benchmarks.measure import Driven, apart
from benchmarks.peers import Peer, chosen
from benchmarks.report import Row, gathered, row
from benchmarks.scale import slope
from benchmarks.turns import Effort, measured

NODES = (3, 10, 30, 100)
FEW_NODES = (3, 30)
MEGABYTES = 2
CARD = 2 * MEGABYTE
"""Bytes per second that a node sends, slow enough that this machine's processors do not count."""
PIECE = 16 * 1024
SECRET = b"the secret of a simulated run"
DEADLINE = 300.0
RECEIVED = "until all have received it"
GROWTH = "growth"


class Case(NamedTuple):
    """A number of nodes."""

    peer: Peer
    nodes: int

    @property
    def title(self) -> str:
        return titled(self.nodes)


def titled(nodes: int) -> str:
    """Return the title of a case."""
    return f"{MEGABYTES} MB to {nodes:,} nodes that send {CARD // MEGABYTE} MB/s"


def measure(effort: Effort) -> list[Row]:
    """Measure the distribution, and fit how it grows."""
    sizes = FEW_NODES if effort.quick else NODES
    cases = [Case(peer, nodes) for nodes in sizes for peer in chosen(("ours",), effort.families)]
    rows = measured(cases, effort.rounds, _drive, _rows)
    points = [
        (case.nodes, each.median)
        for case, each in zip(cases, rows, strict=True)
        if each.median is not None
    ]
    if len(points) < 2:
        return rows
    note = "the power of the number of nodes: 1 is linear"
    title = f"from {points[0][0]} to {points[-1][0]} nodes"
    return [*rows, row(cases[0].peer, title, GROWTH, [slope(points)], "", note)]


def drive(nodes: int) -> dict[str, Any]:
    """Send a block from a driver to many nodes in this process, as runs do."""
    from distributor.control.program_distribution import ProgramDistribution
    from distributor.wire.transfer import BlockServer, MemoryBlock

    content = bytes(MEGABYTES * MEGABYTE)
    events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    answers: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(nodes)]
    sources = ProgramDistribution(lambda node, message: answers[node].put(message))
    card = _Card()
    with (
        BlockServer("127.0.0.1", SECRET, card.limited(MemoryBlock([content]))) as server,
        contextlib.ExitStack() as until_all,
    ):
        driver = "127.0.0.1", server.port
        threads = [
            threading.Thread(
                target=_receive, args=(node, driver, answers[node], events, len(content), until_all)
            )
            for node in range(nodes)
        ]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        for node in range(nodes):
            sources.want(node, str(node))
        for _ in range(2 * nodes):
            name, *details = events.get(timeout=DEADLINE)
            if name == "failed":
                raise RuntimeError("a node could not receive the program")
            getattr(sources, name)(*details)
        seconds = time.monotonic() - began
        for thread in threads:
            thread.join()
    return {"seconds": [seconds]}


def _receive(
    node: int,
    driver: tuple[str, int],
    answers: queue.SimpleQueue[Any],
    events: queue.SimpleQueue[tuple[Any, ...]],
    size: int,
    until_all: contextlib.ExitStack,
) -> None:
    """Act as a node: receive from the source that the driver names, and pass on meanwhile."""
    from distributor.wire.transfer import ArrivingBlock, BlockServer, receive

    source = answers.get().address or driver
    address = f"127.1.{node // 250}.{node % 250 + 1}"
    block = ArrivingBlock(until_all.enter_context(tempfile.TemporaryFile()), size)
    server = until_all.enter_context(BlockServer(address, SECRET, _Card().limited(block)))
    events.put(("relay", address, server.port))
    for each in (source, driver):  # as a real node does
        if block.arrived < size:
            with contextlib.suppress(OSError):
                receive(each, SECRET, node, block.arrived, block.append)
    events.put(("stored", node, str(node)) if block.arrived == size else ("failed",))


class _Card:
    """A network card, which all blocks of one node share."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self._lock = threading.Lock()

    def limited(self, block: Any) -> _Limited:
        """Return a block that is read no faster than the card sends."""
        return _Limited(block, self)

    def send(self, size: int) -> None:
        """Wait until the card has sent so many bytes."""
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + size / CARD
            wait = self._free_at - time.monotonic()
        time.sleep(wait)


class _Limited:
    def __init__(self, block: Any, card: _Card) -> None:
        self._block = block
        self._card = card

    def read(self, offset: int) -> Iterator[Any]:
        for data in self._block.read(offset):
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                self._card.send(len(piece))
                yield piece


def _drive(case: Case) -> Driven:
    return apart(drive, DEADLINE, nodes=case.nodes)


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    return [row(case.peer, case.title, RECEIVED, gathered(measurements, "seconds"))]
