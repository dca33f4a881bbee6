"""The driver's end of the links of its runs.

A `Hub` has one run's secret, connections, queue and flow control. A `Listener` is the socket of
this process at one address, which all hubs there share; one asyncio loop in one daemon thread
serves it and its connections. A connection belongs to no run until its hello has named a run and
proved that it holds the run's secret.

Messages are unpickled in `Hub.get`, in the consumer's thread. In another thread that could
deadlock: it may need a module that the consumer is importing, while that import waits for the
message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from distributor.core.threads import MessageQueue
from distributor.wire import protocol
from distributor.wire.messages import HERE, LOST, SILENT, Heartbeat

ACCEPTED_AT_ONCE = 16  # at most a few times as many are accepted and not yet counted
BACKLOG = 1024
FLUSH_SECONDS = 1.0
MAX_UNAUTHENTICATED = 4096  # fewer if this process may open few file descriptors
HANDSHAKE_SECONDS = 10.0
READ_BYTES = 4096  # the size of each connection's buffer for small frames

FRAME_OVERHEAD = 256  # bytes that a queued frame costs beside its payload: tiny ones add up
MAX_OUTGOING = 64 * 2**20
MAX_WAITING = 32 * 2**20

_log = logging.getLogger(__name__)


class Hub:
    """Receives from the nodes that prove this run's secret, and sends to them."""

    def __init__(self, bind_address: str, secret: bytes, *, port: int = 0) -> None:
        if not secret:
            raise ValueError("a hub without a secret would accept any connection")
        self.secret = secret
        self.key = protocol.run_key(secret)
        self.peers: dict[int, Peer] = {}
        self._events: MessageQueue[_Frame | tuple[int, object]] = MessageQueue()
        self._waiting = 0
        self._waiting_lock = threading.Lock()
        self._held_back = False
        self.closed = threading.Event()  # while others use the listener: all peers have gone
        self._listener = _listen(bind_address, port, self)
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
                event = self._events.get(deadline - time.monotonic())
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

        Slow readers get `FLUSH_SECONDS` to catch up.
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


class Peer(asyncio.BufferedProtocol):
    """One connection, which first sends a hello and then frames.

    It reads no byte beyond the hello before it has accepted it. Small frames are then read together
    into one buffer, and a large one into a buffer of its own, which the hub keeps.
    """

    transport: asyncio.Transport
    session: protocol.Session
    hub: Hub | None = None
    node = HERE  # none yet
    silent_intervals = 0  # between heartbeats, since bytes came last
    garbled = False  # a message could not be read: later ones of this connection are discarded

    def __init__(self, listener: Listener) -> None:
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
            if self.hub is not None:
                self._take_frames()
            elif self._filled == protocol.HELLO.size:
                self._take_hello()
        except ConnectionError as error:
            if self.hub is not None:
                _log.warning("the link of node %d is closed: %s", self.node, error)
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._listener.gone(self)

    def send(self, frame: protocol.Frame) -> None:
        self.transport.writelines([*frame, self.session.sent.next(*frame)])

    def _read_into(self, buffer: bytearray, filled: bytes | memoryview = b"") -> None:
        self._buffer = buffer
        self._filled = len(filled)
        memoryview(buffer)[: self._filled] = filled

    def _take_hello(self) -> None:
        self.transport.write(self._listener.admit(self, self._buffer))
        if self.hub is None:  # it has asked whether its run is served, and no more
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
        assert self.hub is not None
        if len(frame) <= READ_BYTES:
            frame = memoryview(bytes(frame))  # the buffer is used again
        content = frame[: -protocol.TAG_SIZE]
        self.session.received.check(frame[-protocol.TAG_SIZE :], content)
        self.hub.received(self, content[protocol.HEADER.size :])


class Listener:
    """A bound address that serves the hubs added to it."""

    def __init__(self, address: str, port: int, family: socket.AddressFamily) -> None:
        self.address = address
        self._hubs: dict[bytes, Hub] = {}
        self._open: set[Peer] = set()
        self._unauthenticated: dict[Peer, None] = {}  # an ordered set, oldest first
        self._stop = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._not_listening = threading.Event()
        self._forked = False
        self._socket = socket.create_server((address, port), family=family, backlog=BACKLOG)
        try:
            protocol.tune(self._socket)  # accepted sockets inherit the options
            self.port: int = self._socket.getsockname()[1]
            # Not new_event_loop(), which would use a loop policy that the user has installed.
            self.loop = asyncio.SelectorEventLoop()
            self._thread = threading.Thread(target=self._run, name="distributor-hub", daemon=True)
            self._thread.start()
        except BaseException:
            self._socket.close()
            raise

    def add(self, hub: Hub) -> None:
        if self._hubs.setdefault(hub.key, hub) is not hub:
            raise ValueError("another run at this address has the same secret")

    def remove(self, hub: Hub) -> None:
        """Close a hub's connections, and with the last hub the listener too.

        Slow readers get FLUSH_SECONDS to catch up.
        """
        if self._forked:
            return
        with _lock:
            if self._hubs.pop(hub.key, None) is None:
                return  # closed already
            last = not self._hubs
            if last:
                _listeners.remove(self)
                self.call(self._stop.set)
                self._not_listening.wait()  # the next run may ask for the same port
            else:
                self.call(self._close_hub, hub)
        if last:
            self._thread.join()
        else:
            hub.closed.wait()

    def call(self, function: Callable[..., object], *args: object) -> None:
        if not self._forked:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(function, *args)

    def forget(self) -> None:
        """Release the sockets in a forked child: only the parent serves and closes them."""
        self._forked = True
        sockets = [self._socket, *(peer.transport.get_extra_info("socket") for peer in self._open)]
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (each.fileno() for each in sockets):
            if descriptor >= 0:
                # Replaced and not closed, because the socket object would later close it again.
                os.dup2(null, descriptor, inheritable=False)
        os.close(null)

    # Everything below runs in the loop's thread.

    def _run(self) -> None:
        try:
            with contextlib.closing(self.loop), self._socket:
                self.loop.run_until_complete(self._serve())
        finally:
            self._not_listening.set()

    async def _serve(self) -> None:
        server = await self.loop.create_server(
            lambda: Peer(self), sock=self._socket, backlog=ACCEPTED_AT_ONCE
        )
        self._socket.listen(BACKLOG)  # asyncio's backlog is also how many it accepts at once
        beating = self.loop.create_task(self._beat())
        await self._stop.wait()
        beating.cancel()
        # Connections that asyncio is accepting become peers first: a closed server would raise.
        self.loop.remove_reader(self._socket)
        if accepting := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(accepting)
        server.close()
        self._not_listening.set()
        for peer in self._open:
            self._close(peer)
        if self._open:
            await self._all_gone.wait()

    async def _beat(self) -> None:
        """Show the nodes that the driver lives, and find the nodes that do not answer."""
        frame = protocol.encode(Heartbeat())
        patient_until = 0.0
        while True:
            due_at = self.loop.time() + protocol.HEARTBEAT_SECONDS
            await asyncio.sleep(protocol.HEARTBEAT_SECONDS)
            now = self.loop.time()
            if now > due_at + protocol.HEARTBEAT_SECONDS:
                # This process, or its machine, was stopped. What TCP could not deliver meanwhile,
                # it repeats after at most as long a time again.
                patient_until = now + (now - due_at)
            for hub in list(self._hubs.values()):
                hub.beat(frame, delayed=now < patient_until)

    def _close_hub(self, hub: Hub) -> None:
        if not hub.peers:
            hub.closed.set()
        for peer in hub.peers.values():
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        peer.transport.close()
        self.loop.call_later(FLUSH_SECONDS, peer.transport.abort)

    def connected(self, peer: Peer) -> None:
        self._open.add(peer)
        self._unauthenticated[peer] = None
        if len(self._unauthenticated) > _max_unauthenticated():
            # Not the newest: silent strangers would keep out nodes that hold the secret.
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()

    def admit(self, peer: Peer, hello: bytearray) -> bytes:
        """Add a peer to the hub that its hello names, unless it only asks if that is served."""
        hub = self._hubs.get(protocol.key_in(hello))
        if hub is None:
            if protocol.is_probe(hello):
                return protocol.UNKNOWN_RUN
            raise protocol.HandshakeRefused("no run of this process has that key")
        node, welcome, peer.session = protocol.admit(hub.secret, peer.nonce, hello)
        if node != protocol.PROBE:
            peer.node = node
            hub.admit(peer)
            peer.hub = hub
            self._unauthenticated.pop(peer)
        return welcome

    def gone(self, peer: Peer) -> None:
        self._open.discard(peer)
        self._unauthenticated.pop(peer, None)
        if hub := peer.hub:
            hub.gone(peer)
            if not hub.peers and self._hubs.get(hub.key) is not hub:
                hub.closed.set()
        if not self._open and self._stop.is_set():
            self._all_gone.set()


def _listen(bind_address: str, port: int, hub: Hub) -> Listener:
    """Add a hub to this process's listener at an address, which is created if there is none."""
    family, _, _, _, found = socket.getaddrinfo(bind_address, port, type=socket.SOCK_STREAM)[0]
    address = str(found[0])
    with _lock:
        for listener in _listeners:
            if listener.address == address and port in (0, listener.port):  # 0 is any port
                break
        else:
            listener = Listener(address, port, family)
            _listeners.append(listener)
        listener.add(hub)
    return listener


def _max_unauthenticated() -> int:
    """Return a limit that leaves half of this process's descriptors to the run and the user."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = most == resource.RLIM_INFINITY
    return MAX_UNAUTHENTICATED if unlimited else min(MAX_UNAUTHENTICATED, most // 2)


_lock = threading.Lock()
_listeners: list[Listener] = []


def _forget_all() -> None:
    """Release all listeners in a forked child, which has no thread that would serve them."""
    global _lock
    _lock = threading.Lock()
    for listener in _listeners:
        listener.forget()
    _listeners.clear()


os.register_at_fork(after_in_child=_forget_all)
