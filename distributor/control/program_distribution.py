"""Which node receives a large program from where: from the driver, or from another node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from distributor.wire.messages import ProgramSource, ProgramStored

FAN_OUT = 2
"""Nodes that a source sends to at the same time: with a tree of sources, time grows as log N."""


class ProgramDistribution:
    """Assigns sources to the nodes that lack the program, as they ask.

    One node for each folder receives it. Nodes are preferred to the driver as sources, so that the
    driver sends each byte `FAN_OUT` times, and more often only if nodes cannot pass it on.

    Parameters
    ----------
    send : callable
        Called with a node and a message for it.
    """

    def __init__(self, send: Callable[[int, ProgramSource | ProgramStored], object]) -> None:
        self._send = send
        self._folders: dict[str, int] = {}
        self._stored: set[str] = set()
        self._waiting: dict[str, list[int]] = {}
        self._queue: deque[int] = deque()
        self._free = deque([ProgramSource(None)] * FAN_OUT)
        self._sources: dict[int, ProgramSource] = {}

    def want(self, node: int, folder: str) -> None:
        """Note that a node's folder lacks the program."""
        if folder in self._stored:
            self._send(node, ProgramStored(folder))
        elif folder in self._folders:
            self._waiting.setdefault(folder, []).append(node)
        else:
            self._folders[folder] = node
            self._queue.append(node)
            self._assign()

    def relay(self, host: str, port: int) -> None:
        """Note that a node sends what it receives to others."""
        self._free.extendleft([ProgramSource((host, port))] * FAN_OUT)
        self._assign()

    def stored(self, node: int, folder: str) -> None:
        """Note that a node has received the program."""
        self._stored.add(folder)
        for other in self._waiting.pop(folder, []):
            self._send(other, ProgramStored(folder))
        if source := self._sources.pop(node, None):
            add = self._free.append if source.address is None else self._free.appendleft
            add(source)
            self._assign()

    def _assign(self) -> None:
        while self._queue and self._free:
            node, source = self._queue.popleft(), self._free.popleft()
            self._sources[node] = source
            self._send(node, source)
