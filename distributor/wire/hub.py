"""The driver's end of one run's links: the messages of all nodes arrive in one queue.

The socket and its thread are a `Listener`, which several runs may share; each run has its own
secret, queue and flow control. Messages are unpickled in `Hub.get`, in the consumer's thread. In
another thread that could deadlock: it may need a module that the consumer is importing, while that
import waits for the message.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from typing import Final, NamedTuple

from distributor.wire import protocol
from distributor.wire.listener import NO_NODE, Peer, Run, listen
from distributor.wire.messages import Heartbeat

HERE: Final = NO_NODE  # the node index of messages that the driver posts to itself

FRAME_OVERHEAD = 256  # bytes that a queued frame costs beside its payload: tiny ones add up
MAX_OUTGOING = 64 * 2**20
MAX_WAITING = 32 * 2**20

_log = logging.getLogger(__name__)


class Lost(enum.Enum):
    """Follows a node's last message; an Enum so that ``message is LOST`` narrows its type."""

    LOST = "lost"
    SILENT = "silent"


LOST: Final = Lost.LOST
# Comes before `LOST` if the connection is open, but the node has been silent for too long.
SILENT: Final = Lost.SILENT


class Hub(Run):
    """Receives from the nodes that prove this run's secret, and sends to them."""

    def __init__(self, bind_address: str, secret: bytes, *, port: int = 0) -> None:
        if not secret:
            raise ValueError("a hub without a secret would accept any connection")
        self.secret = secret
        self.peers: dict[int, Peer] = {}
        self._events: queue.SimpleQueue[_Frame | tuple[int, object]] = queue.SimpleQueue()
        self._waiting = 0
        self._waiting_lock = threading.Lock()
        self._held_back = False
        self._listener = listen(bind_address, port, self)
        self.port = self._listener.port

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, timeout: float) -> tuple[int, object] | None:
        """Wait for the next message, at most ``timeout`` seconds, and return it after its node.

        The last ones of a node are `SILENT`, if the hub gave it up, and `LOST`.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if not isinstance(event, _Frame):
                return event
            self._consumed(len(event.payload) + FRAME_OVERHEAD)
            if event.peer.garbled:
                continue
            try:
                message = protocol.decode(event.payload)
            except Exception:
                # Later messages of that peer are discarded: a gap would be worse than an end.
                event.peer.garbled = True
                _log.warning("cannot unpickle a message of node %d", event.peer.node, exc_info=True)
                self._listener.call(event.peer.transport.abort)
                continue
            if not isinstance(message, Heartbeat):  # its arrival has been noted already
                return event.peer.node, message

    # Any thread may call these three, which do not wait. What is sent to a node that is not
    # connected is dropped.

    def post(self, message: object) -> None:
        self._events.put((HERE, message))

    def send(self, node: int, message: object) -> None:
        self._listener.call(self._write, protocol.encode(message), node)

    def broadcast(self, message: object) -> None:
        self._listener.call(self._write, protocol.encode(message), None)

    def nodes(self) -> set[int]:
        return set(self.peers)  # atomic in CPython, so no lock is needed

    def close(self) -> None:
        """Close this run's connections, and with the last run of the address the listener.

        Slow readers get `listener.FLUSH_SECONDS` to catch up.
        """
        self._listener.remove(self)

    def _consumed(self, size: int) -> None:
        # At half of the limit, so that a consumer that just keeps up does not switch each time.
        with self._waiting_lock:
            before, self._waiting = self._waiting, self._waiting - size
            crossed = before > MAX_WAITING // 2 >= self._waiting
        if crossed:
            self._listener.call(self._resume_reading)

    # Everything below runs in the listener's thread.

    def admit(self, peer: Peer) -> None:
        if peer.node in self.peers:
            raise protocol.HandshakeRefused(f"node {peer.node} is connected already")
        self.peers[peer.node] = peer
        if self._held_back:
            peer.transport.pause_reading()

    def received(self, peer: Peer, payload: memoryview) -> None:
        with self._waiting_lock:
            self._waiting += len(payload) + FRAME_OVERHEAD
            full = self._waiting > MAX_WAITING
        self._events.put(_Frame(peer, payload))
        if full and not self._held_back:
            self._held_back = True
            for other in self.peers.values():
                other.transport.pause_reading()

    def beat(self, frame: protocol.Frame, *, delayed: bool) -> None:
        for peer in list(self.peers.values()):
            # Not by the clock, because this process may not have run all the time.
            peer.silent_intervals += 1
            if delayed or self._held_back:  # what they sent may not have been read
                peer.silent_intervals = 0
            elif peer.silent_intervals * protocol.HEARTBEAT_SECONDS >= protocol.NODE_LEASE_SECONDS:
                self._events.put((peer.node, SILENT))
                peer.transport.abort()
        self._write(frame, None)

    def gone(self, peer: Peer) -> None:
        del self.peers[peer.node]
        self._events.put((peer.node, LOST))

    def _write(self, frame: protocol.Frame, node: int | None) -> None:
        for peer in self.peers.values() if node is None else [self.peers.get(node)]:
            if peer and not peer.transport.is_closing():
                peer.send(frame)
                if peer.transport.get_write_buffer_size() > MAX_OUTGOING:
                    peer.transport.abort()

    def _resume_reading(self) -> None:
        if self._held_back and self._waiting <= MAX_WAITING:
            self._held_back = False
            for peer in self.peers.values():
                peer.transport.resume_reading()


class _Frame(NamedTuple):
    peer: Peer
    payload: memoryview
