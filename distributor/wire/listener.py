"""The listening socket of a process at one address, which all runs with a hub there share.

One asyncio loop in one daemon thread serves the socket and its connections. A connection belongs to
no run until its hello has named a run and proved that it holds the run's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable

from distributor.wire import protocol
from distributor.wire.messages import Heartbeat
from distributor.wire.peer import Peer, Run

ACCEPTED_AT_ONCE = 16  # at most a few times as many are accepted and not yet counted
BACKLOG = 1024
FLUSH_SECONDS = 1.0
MAX_UNAUTHENTICATED = 4096  # fewer if this process may open few file descriptors


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
        """Admit connections that prove that they hold the run's secret."""
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
        """Call a function in the listener's thread, unless that has ended."""
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
        """Count a new connection; abort the oldest one without a proof if there are too many."""
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
        """Remove a connection that has ended."""
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
