"""The driver's listener: the links of all nodes end here, and one queue holds what they say.

One asyncio loop in one daemon thread serves the sockets. Messages are unpickled in `Hub.get`, in
the consumer's thread: in another, a class from the module that the consumer is just importing would
wait for an import that waits for the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from distributor.wire import frames
from distributor.wire.messages import Beat

HERE: Final = -1  # the node index of messages that the driver posts to itself

ACCEPTED_AT_ONCE = 16  # what is accepted and not yet counted is a few times that at most
BACKLOG = 1024
FLUSH_SECONDS = 1.0
FRAME_OVERHEAD = 256  # what a waiting frame costs beyond its bytes: tiny ones add up, too
HANDSHAKE_SECONDS = 10.0
MAX_OUTGOING = 64 * 2**20
MAX_UNPROVED = 4096  # fewer where this process may open few descriptors
MAX_WAITING = 32 * 2**20

_log = logging.getLogger(__name__)


class Lost(enum.Enum):
    """What follows a node's last message; an Enum so that ``message is LOST`` narrows its type."""

    LOST = "lost"
    SILENT = "silent"


LOST: Final = Lost.LOST
SILENT: Final = Lost.SILENT
"""Comes before `LOST` where the connection stands, but the node has not been heard for a while."""


class Hub:
    """Listens for links at ``bind_address`` alone, and believes those that prove the secret.

    Raises
    ------
    OSError
        Where the address or the port (0: one that the system chooses) cannot be had.
    """

    def __init__(self, bind_address: str, secret: bytes, *, port: int = 0) -> None:
        if not secret:
            raise ValueError("a hub without a secret would believe anyone")
        self._secret = secret
        self._events: queue.SimpleQueue[_Frame | tuple[int, object]] = queue.SimpleQueue()
        self._open: set[_Peer] = set()
        self._unproved: dict[_Peer, None] = {}  # a set in the order in which they came
        self._proven: dict[int, _Peer] = {}
        self._waiting = 0
        self._waiting_lock = threading.Lock()
        self._held_back = False
        self._stop = asyncio.Event()
        self._all_gone = asyncio.Event()
        family = socket.getaddrinfo(bind_address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((bind_address, port), family=family, backlog=BACKLOG)
        try:
            frames.tune(listener)  # what it accepts inherits that
            self.port: int = listener.getsockname()[1]
            # Not new_event_loop(): whatever loop policy the user has installed is theirs.
            self._loop = asyncio.SelectorEventLoop()
            self._thread = threading.Thread(
                target=self._run, args=[listener], name="distributor-hub", daemon=True
            )
            self._thread.start()
        except BaseException:
            listener.close()
            raise

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, timeout: float) -> tuple[int, object] | None:
        """Wait for the next message, at most ``timeout`` seconds.

        Returns
        -------
        tuple of int and object, or None
            A node and its message, in the order in which that node sent them, or ``(node, LOST)``
            after its last, with ``(node, SILENT)`` before it where the node was given up;
            ``(HERE, message)`` for what was posted; None when the time is up.
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
                message = frames.decode(event.payload)
            except Exception:
                # What that peer sent after it is passed over: a gap would be worse than an end.
                event.peer.garbled = True
                _log.warning("cannot read what node %d sent", event.peer.node, exc_info=True)
                self._call(event.peer.transport.abort)
                continue
            if not isinstance(message, Beat):  # that it came is all that it says
                return event.peer.node, message

    def post(self, message: object) -> None:
        """Put a message of the driver's own into the queue, from any thread."""
        self._events.put((HERE, message))

    def send(self, node: int, message: object) -> None:
        """Send to one node, from any thread and without waiting; dropped if it is not connected.

        Raises
        ------
        FrameTooLarge
            Where the pickled message is larger than `frames.MAX_FRAME`.
        """
        self._call(self._write, frames.encode(message), node)

    def broadcast(self, message: object) -> None:
        """Send to every node that is connected, as `send` does."""
        self._call(self._write, frames.encode(message), None)

    def nodes(self) -> set[int]:
        """Return the nodes that are connected and have proved themselves."""
        return set(self._proven)  # one step under the interpreter's lock, so none of ours

    def close(self) -> None:
        """Close listener, connections and thread; slow readers get FLUSH_SECONDS to catch up."""
        self._call(self._stop.set)
        self._thread.join()

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _consumed(self, size: int) -> None:
        # At half of the limit, so that a consumer just keeping up does not switch at every message.
        with self._waiting_lock:
            before, self._waiting = self._waiting, self._waiting - size
            crossed = before > MAX_WAITING // 2 >= self._waiting
        if crossed:
            self._call(self._go_on)

    # From here on everything runs in the loop's thread.

    def _run(self, listener: socket.socket) -> None:
        with contextlib.closing(self._loop), listener:
            self._loop.run_until_complete(self._serve(listener))

    async def _beat(self) -> None:
        """Let the nodes know that the driver lives, and find those that do not answer."""
        frame = frames.encode(Beat())
        while True:
            before = self._loop.time()
            await asyncio.sleep(frames.BEAT_SECONDS)
            now = self._loop.time()
            paused = self._held_back or now > before + 2 * frames.BEAT_SECONDS
            for peer in list(self._proven.values()):
                if paused:  # whoever was not heard may well have spoken
                    peer.heard = now
                elif now > peer.heard + frames.LEASE_SECONDS:
                    self._events.put((peer.node, SILENT))
                    peer.transport.abort()
            self._write(frame, None)

    async def _serve(self, listener: socket.socket) -> None:
        server = await self._loop.create_server(
            lambda: _Peer(self), sock=listener, backlog=ACCEPTED_AT_ONCE
        )
        listener.listen(BACKLOG)  # what asyncio calls so is also how many it accepts at once
        beating = self._loop.create_task(self._beat())
        await self._stop.wait()
        beating.cancel()
        # What asyncio is just accepting becomes a peer first: a closed server would trip over it.
        self._loop.remove_reader(listener)
        if accepting := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(accepting)
        server.close()
        for peer in self._open:
            peer.transport.close()
            self._loop.call_later(FLUSH_SECONDS, peer.transport.abort)
        if self._open:
            await self._all_gone.wait()

    def _write(self, frame: bytes, node: int | None) -> None:
        for peer in self._proven.values() if node is None else [self._proven.get(node)]:
            if peer and not peer.transport.is_closing():
                peer.transport.write(frame)
                if peer.transport.get_write_buffer_size() > MAX_OUTGOING:
                    peer.transport.abort()

    def _go_on(self) -> None:
        if self._held_back and self._waiting <= MAX_WAITING:
            self._held_back = False
            for peer in self._proven.values():
                peer.transport.resume_reading()

    def _connected(self, peer: _Peer) -> None:
        self._open.add(peer)
        self._unproved[peer] = None
        if len(self._unproved) > _most_unproved():
            # Not the newcomer, or silent strangers would keep out whoever can prove the secret.
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.transport.abort()

    def _admit(self, peer: _Peer, hello: bytearray) -> bytes:
        node, welcome = frames.admit(self._secret, peer.nonce, hello)
        if node in self._proven:
            raise frames.HandshakeRefused(f"node {node} is connected already")
        self._unproved.pop(peer)
        self._proven[node] = peer
        peer.node, peer.heard = node, self._loop.time()
        if self._held_back:
            peer.transport.pause_reading()
        return welcome

    def _received(self, peer: _Peer, payload: bytearray) -> None:
        with self._waiting_lock:
            self._waiting += len(payload) + FRAME_OVERHEAD
            full = self._waiting > MAX_WAITING
        self._events.put(_Frame(peer, payload))
        if full and not self._held_back:
            self._held_back = True
            for other in self._proven.values():
                other.transport.pause_reading()

    def _gone(self, peer: _Peer) -> None:
        self._open.discard(peer)
        self._unproved.pop(peer, None)
        if self._proven.get(peer.node) is peer:
            del self._proven[peer.node]
            self._events.put((peer.node, LOST))
        if not self._open and self._stop.is_set():
            self._all_gone.set()


def _most_unproved() -> int:
    """Leave half of the descriptors of this process to the run and to the user."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_UNPROVED if most == resource.RLIM_INFINITY else min(MAX_UNPROVED, most // 2)


class _Peer(asyncio.BufferedProtocol):
    """One connection; never reads a byte beyond what its next step needs: a hello, then frames."""

    transport: asyncio.Transport
    node = HERE
    heard = 0.0
    garbled = False

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.nonce = os.urandom(frames.NONCE_SIZE)
        self._expect(frames.HELLO.size, self._on_hello)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._timer = self._hub._loop.call_later(HANDSHAKE_SECONDS, transport.abort)
        transport.write(frames.GREETING.pack(frames.MAGIC, self.nonce))
        self._hub._connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        self.heard = self._hub._loop.time()
        if self._filled == len(self._buffer):
            try:
                self._then(self._buffer)
            except ConnectionError:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._hub._gone(self)

    def _expect(self, size: int, then: Callable[[bytearray], None]) -> None:
        self._buffer = bytearray(size)
        self._filled = 0
        self._then = then

    def _on_hello(self, hello: bytearray) -> None:
        self.transport.write(self._hub._admit(self, hello))
        self._timer.cancel()
        self._expect(frames.HEADER.size, self._on_header)

    def _on_header(self, header: bytearray) -> None:
        (length,) = frames.HEADER.unpack(header)
        self._expect(frames.check_length(length), self._on_payload)

    def _on_payload(self, payload: bytearray) -> None:
        self._expect(frames.HEADER.size, self._on_header)
        self._hub._received(self, payload)


class _Frame(NamedTuple):
    peer: _Peer
    payload: bytearray
