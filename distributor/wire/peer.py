"""The driver's end of one node's connection: the handshake, and then frames."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final, Protocol

from distributor.wire import protocol

HANDSHAKE_SECONDS = 10.0
NO_NODE: Final = -1

_log = logging.getLogger(__name__)


class Run(Protocol):
    """A run that a listener serves; the listener's thread calls its methods."""

    secret: bytes
    peers: dict[int, Peer]
    """The authenticated connections, by node index."""

    def admit(self, peer: Peer) -> None:
        """Add a peer that has proved that it holds the secret, and has named its node.

        Raises
        ------
        HandshakeRefused
            If that node is connected already.
        """

    def received(self, peer: Peer, payload: memoryview) -> None:
        """Queue a frame's payload."""

    def beat(self, frame: protocol.Frame, *, delayed: bool) -> None:
        """Send a heartbeat to all peers, and disconnect those that were silent for too long.

        ``delayed`` means that this process was held up, so silence of the peers means nothing.
        """

    def gone(self, peer: Peer) -> None:
        """Remove a peer whose connection has ended."""


class Connections(Protocol):
    """What a listener does for its peers; all in its thread."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def connected(self, peer: Peer) -> None:
        """Count a new connection."""

    def admit(self, peer: Peer, hello: bytearray) -> bytes:
        """Add a peer to the run that its hello names; return the welcome to send."""

    def gone(self, peer: Peer) -> None:
        """Remove a connection that has ended."""


class Peer(asyncio.BufferedProtocol):
    """One connection, which first sends a hello and then frames.

    It never reads a byte beyond what its next step needs.

    Attributes
    ----------
    run, node
        The run that it belongs to, and its node's index; None and `NO_NODE` until its hello.
    session
        The tags of its frames, from its hello on.
    silent_intervals
        How many intervals between heartbeats have ended since bytes came last.
    garbled
        Whether a message could not be read. Later messages of this connection are discarded.
    """

    transport: asyncio.Transport
    session: protocol.Session
    run: Run | None = None
    node = NO_NODE
    silent_intervals = 0
    garbled = False

    def __init__(self, listener: Connections) -> None:
        self._listener = listener
        self.nonce = os.urandom(protocol.NONCE_SIZE)
        self._expect(protocol.HELLO.size, self._on_hello)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._timer = self._listener.loop.call_later(HANDSHAKE_SECONDS, transport.abort)
        transport.write(protocol.GREETING.pack(protocol.MAGIC, self.nonce))
        self._listener.connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        self.silent_intervals = 0
        if self._filled == len(self._buffer):
            try:
                self._then(self._buffer)
            except ConnectionError as error:
                if self.run is not None:
                    _log.warning("the link of node %d is closed: %s", self.node, error)
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._listener.gone(self)

    def send(self, frame: protocol.Frame) -> None:
        """Send a frame."""
        self.transport.writelines([*frame, self.session.sent.next(*frame)])

    def _expect(self, size: int, then: Callable[[bytearray], None]) -> None:
        self._buffer = bytearray(size)
        self._filled = 0
        self._then = then

    def _on_hello(self, hello: bytearray) -> None:
        self.transport.write(self._listener.admit(self, hello))
        if self.run is None:  # it has asked whether its run is served, and no more
            self.transport.close()
            return
        self._timer.cancel()
        self._expect(protocol.HEADER.size, self._on_header)

    def _on_header(self, header: bytearray) -> None:
        self._header = bytes(header)
        (length,) = protocol.HEADER.unpack(header)
        self._expect(protocol.check_length(length) + protocol.TAG_SIZE, self._on_payload)

    def _on_payload(self, payload: bytearray) -> None:
        assert self.run is not None
        content = memoryview(payload)[: -protocol.TAG_SIZE]
        self.session.received.check(self._header, content, payload[-protocol.TAG_SIZE :])
        self._expect(protocol.HEADER.size, self._on_header)
        self.run.received(self, content)
