"""The listening socket of a process at one address, which all runs with a hub there share.

One asyncio loop in one daemon thread serves the socket and its connections. A connection belongs to
no run until its hello has named a run and proved that it holds the run's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable
from typing import Final

from distributor.wire import protocol
from distributor.wire.messages import Heartbeat

ACCEPTED_AT_ONCE = 16  # at most a few times as many are accepted and not yet counted
BACKLOG = 1024
FLUSH_SECONDS = 1.0
MAX_UNAUTHENTICATED = 4096  # fewer if this process may open few file descriptors
HANDSHAKE_SECONDS = 10.0
NO_NODE: Final = -1
READ_BYTES = 4096  # the size of each connection's buffer for small frames

_log = logging.getLogger(__name__)


class Run:
    """A run that a listener serves; the listener's thread calls its methods."""

    secret: bytes
    peers: dict[int, Peer]  # the authenticated connections, by node index

    def admit(self, peer: Peer) -> None:
        """Add a peer that has proved that it holds the secret, and has named its node."""

    def received(self, peer: Peer, payload: memoryview) -> None:
        """Queue a frame's payload."""

    def beat(self, frame: protocol.Frame, *, delayed: bool) -> None:
        """Send a heartbeat to all peers; disconnect those that are silent unless it is ``delayed``.

        That is, this process was held up, so silence of the peers means nothing.
        """

    def gone(self, peer: Peer) -> None:
        """Remove a peer whose connection has ended."""


class Peer(asyncio.BufferedProtocol):
    """One connection, which first sends a hello and then frames.

    It reads no byte beyond the hello before it has accepted it. Small frames are then read together
    into one buffer, and a large one into a buffer of its own, which the run keeps.
    """

    transport: asyncio.Transport
    session: protocol.Session
    run: Run | None = None
    node = NO_NODE
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


class Listener:
    """A bound address that serves the runs added to it; see `listen`."""

    def __init__(self, address: str, port: int, family: socket.AddressFamily) -> None:
        self.address = address
        self._runs: dict[bytes, Run] = {}
        self._open: set[Peer] = set()
        self._unauthenticated: dict[Peer, None] = {}  # an ordered set, oldest first
        self._closing: dict[bytes, threading.Event] = {}
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

    def serves(self, address: str, port: int) -> bool:
        """Return whether this listens at the address, and at the port unless that is 0 (any)."""
        return self.address == address and port in (0, self.port)

    def add(self, run: Run) -> None:
        if self._runs.setdefault(protocol.run_key(run.secret), run) is not run:
            raise ValueError("another run at this address has the same secret")

    def remove(self, run: Run) -> None:
        """Close a run's connections, and with the last run the listener too.

        Slow readers get FLUSH_SECONDS to catch up.
        """
        if self._forked:
            return
        key = protocol.run_key(run.secret)
        closed = threading.Event()
        with _lock:
            if self._runs.pop(key, None) is None:
                return  # closed already
            last = not self._runs
            if last:
                _listeners.remove(self)
                self.call(self._stop.set)
                self._not_listening.wait()  # the next run may ask for the same port
            else:
                self.call(self._close_run, run, closed)
        if last:
            self._thread.join()
        else:
            closed.wait()

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
            for run in list(self._runs.values()):
                run.beat(frame, delayed=now < patient_until)

    def _close_run(self, run: Run, closed: threading.Event) -> None:
        if not run.peers:
            closed.set()
            return
        self._closing[protocol.run_key(run.secret)] = closed
        for peer in run.peers.values():
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
        """Add a peer to the run that its hello names, unless it only asks if that is served."""
        run = self._runs.get(protocol.key_in(hello))
        if run is None:
            if protocol.is_probe(hello):
                return protocol.UNKNOWN_RUN
            raise protocol.HandshakeRefused("no run of this process has that key")
        node, welcome, peer.session = protocol.admit(run.secret, peer.nonce, hello)
        if node != protocol.PROBE:
            peer.node = node
            run.admit(peer)
            peer.run = run
            self._unauthenticated.pop(peer)
        return welcome

    def gone(self, peer: Peer) -> None:
        self._open.discard(peer)
        self._unauthenticated.pop(peer, None)
        if run := peer.run:
            run.gone(peer)
            if not run.peers and (closed := self._closing.pop(protocol.run_key(run.secret), None)):
                closed.set()
        if not self._open and self._stop.is_set():
            self._all_gone.set()


def listen(bind_address: str, port: int, run: Run) -> Listener:
    """Add a run to this process's listener at an address, which is created if there is none."""
    family, _, _, _, found = socket.getaddrinfo(bind_address, port, type=socket.SOCK_STREAM)[0]
    address = str(found[0])
    with _lock:
        listener = next((each for each in _listeners if each.serves(address, port)), None)
        if listener is None:
            listener = Listener(address, port, family)
            _listeners.append(listener)
        listener.add(run)
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
