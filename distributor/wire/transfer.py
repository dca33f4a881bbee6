"""Sends one large block of bytes to nodes, each of which may pass it on while it arrives.

A `BlockServer` is a run of a listener, so that the driver's blocks need no port beside its hub's. A
node proves that it holds the block's secret, sends the offset from which it wants the bytes, and
receives them without frames until the end of the block. A thread for each connection sends them.
Nothing authenticates these bytes: the receiver compares the digest of the whole block.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol

from distributor.errors import ExecutorNotReady
from distributor.wire import protocol
from distributor.wire.connection import connect
from distributor.wire.listener import Peer, Run, listen

CHUNK = 1024 * 1024  # bytes that are sent or received at a time; they stay in a core's cache
PIECE = 8 * CHUNK  # bytes that one thread hashes to compute a block's digest
DIGEST_THREADS = 4
CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0  # seconds without progress after which a transfer fails
_OFFSET = struct.Struct(">Q")


class ProgramNotReceived(ExecutorNotReady):
    """A node has not got a large program over a link, so that Spark has to send it."""


class Block(Protocol):
    """Bytes that a server sends."""

    def read(self, offset: int) -> Iterator[Any]:
        """Yield the bytes from an offset to the end as buffers; wait for those still to come."""


class MemoryBlock:
    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]

    def read(self, offset: int) -> Iterator[memoryview]:
        for piece in self._pieces:
            for start in range(min(offset, piece.nbytes), piece.nbytes, CHUNK):
                yield piece[start : start + CHUNK]
            offset = max(0, offset - piece.nbytes)


class ArrivingBlock:
    """A block that arrives in a file, and can be read meanwhile; a context manager."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self.arrived = 0
        self._file = file
        self._ended = False
        self._changed = threading.Condition()

    def __enter__(self) -> ArrivingBlock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def append(self, data: memoryview) -> None:
        self._file.write(data)
        self._file.flush()
        with self._changed:
            self.arrived += data.nbytes
            self._changed.notify_all()

    def read(self, offset: int) -> Iterator[bytes]:
        while offset < self.size:
            available = self._wait_beyond(offset)
            data = os.pread(self._file.fileno(), min(CHUNK, available - offset), offset)
            offset += len(data)
            yield data

    def _wait_beyond(self, offset: int) -> int:
        """Wait for the byte at an offset, and return how many bytes have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.arrived > offset)
            if self.arrived <= offset:
                raise ConnectionError("the block did not arrive here")
            return self.arrived


class BlockServer(Run):
    """Sends a block to everyone who holds its secret; a context manager."""

    # All servers and hubs of this process at one address share a socket.

    def __init__(self, bind_address: str, secret: bytes, block: Block, *, port: int = 0) -> None:
        self.secret = secret
        self.peers: dict[int, Peer] = {}
        self._block = block
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = listen(bind_address, port, self)
        self.port = self._listener.port

    def __enter__(self) -> BlockServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.remove(self)
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def received(self, peer: Peer, payload: memoryview) -> None:
        """Send the block from the offset that a node has sent, outside of this thread."""
        (offset,) = _OFFSET.unpack(payload)
        sock = peer.transport.get_extra_info("socket").dup()
        peer.transport.abort()  # the event loop must not read from the duplicate's connection
        with self._lock:
            self._open.add(sock)
        threading.Thread(
            target=self._send, args=(sock, offset), name="distributor-block-sender", daemon=True
        ).start()

    def _send(self, sock: socket.socket, offset: int) -> None:
        # A connection that ends early is the receiver's to notice: it knows the block's size.
        with sock, contextlib.suppress(OSError):
            sock.settimeout(STALL_SECONDS)
            for data in self._block.read(offset):
                sock.sendall(data)
        with self._lock:
            self._open.discard(sock)


def block_secret(secret: bytes) -> bytes:
    """Return the secret of a run's block, which differs from that of the run's hub."""
    return hmac.digest(secret, b"distributor: block", "sha256")


def digest(block: Block, size: int) -> str:
    """Return the digest of a block: the SHA-256 of those of its pieces, computed by threads."""
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        pieces = pool.map(lambda start: _digest_of_piece(block, start), range(0, size, PIECE))
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _digest_of_piece(block: Block, start: int) -> bytes:
    found, missing = hashlib.sha256(), PIECE
    for data in block.read(start):
        found.update(memoryview(data)[:missing])
        missing -= len(data)
        if missing <= 0:
            break
    return found.digest()


def receive(
    address: tuple[str, int], secret: bytes, node: int, offset: int, append: Callable[[Any], object]
) -> None:
    """Receive a block from an offset until its server has no more; buffers are overwritten."""
    buffer = memoryview(bytearray(CHUNK))
    sock, session = connect(*address, secret, node, timeout=CONNECT_SECONDS)
    with sock:
        request = protocol.HEADER.pack(_OFFSET.size) + _OFFSET.pack(offset)
        sock.sendall(request + session.sent.next(request))
        sock.settimeout(STALL_SECONDS)
        while count := sock.recv_into(buffer):
            append(buffer[:count])
