"""The driver's end of one node's connection: the handshake, and then frames."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final, Protocol

from distributor.wire import protocol

HANDSHAKE_SECONDS = 10.0
NO_NODE: Final = -1
READ_BYTES = 4096
"""The size of each connection's buffer for small frames."""

_log = logging.getLogger(__name__)


class Run(Protocol):
    """A run that a listener serves; the listener's thread calls its methods."""

    secret: bytes
    peers: dict[int, Peer]
    """The authenticated connections, by node index."""

    def admit(self, peer: Peer) -> None:
        """Add a peer that has proved that it holds the secret, and has named its node."""

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

    It reads no byte beyond the hello before it has accepted it. Small frames are then read together
    into one buffer, and a large one into a buffer of its own, which the run keeps.
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
        self._read_into(bytearray(protocol.HELLO.size))

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
        try:
            if self.run is not None:
                self._take_frames()
            elif self._filled == protocol.HELLO.size:
                self._take_hello()
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

    def _read_into(self, buffer: bytearray, filled: bytes | memoryview = b"") -> None:
        self._buffer = buffer
        self._filled = len(filled)
        memoryview(buffer)[: self._filled] = filled

    def _take_hello(self) -> None:
        self.transport.write(self._listener.admit(self, self._buffer))
        if self.run is None:  # it has asked whether its run is served, and no more
            self.transport.close()
            return
        self._timer.cancel()
        self._read_into(bytearray(READ_BYTES))

    def _take_frames(self) -> None:
        """Take the complete frames from the buffer, and make room for the rest of the next one."""
        view, begin, size = memoryview(self._buffer), 0, 0
        while self._filled >= begin + protocol.HEADER.size and not self.transport.is_closing():
            (length,) = protocol.HEADER.unpack_from(view, begin)
            size = protocol.HEADER.size + protocol.check_length(length) + protocol.TAG_SIZE
            if self._filled < begin + size:
                break
            self._take_frame(view[begin : begin + size])
            begin += size
            size = 0
        rest = view[begin : self._filled]
        if size > READ_BYTES:
            if len(self._buffer) != size:
                self._read_into(bytearray(size), rest)
        elif begin:
            is_own = len(self._buffer) > READ_BYTES
            self._read_into(bytearray(READ_BYTES) if is_own else self._buffer, rest)

    def _take_frame(self, frame: memoryview) -> None:
        assert self.run is not None
        if len(frame) <= READ_BYTES:
            frame = memoryview(bytes(frame))  # the buffer is used again
        content = frame[: -protocol.TAG_SIZE]
        self.session.received.check(frame[-protocol.TAG_SIZE :], content)
        self.run.received(self, content[protocol.HEADER.size :])
