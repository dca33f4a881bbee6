"""Frames and the mutual handshake, which both ends of a link share; no sockets.

A connection begins with three messages of fixed size. In these, each side proves that it holds the
run's secret by an HMAC of the other side's fresh nonce. Nothing is unpickled before that::

    hub  -> link   greeting   MAGIC, hub's nonce
    link -> hub    hello      run key, node index, link's nonce,
                              HMAC(secret, "client" hub's link's key node)
    hub  -> link   welcome    HMAC(secret, "server" link's hub's)

Several runs may share one hub's port. The run key, a hash that does not reveal the secret, says
which run's secret to check.

Then both sides send frames: a length (four bytes, big-endian), a payload of that length, and a tag.
The payload is the length of a pickle, the pickle, and a buffer that the pickle refers to, if any.
The tag is an HMAC of the frame's number, counted from 0, and the frame, with a key of this
connection and direction that is derived from the secret and both nonces. So a frame that was
changed, inserted, repeated, omitted or moved is recognized before it is unpickled.

A node that only wants to know whether the hub still serves its run sends a hello with the index
`PROBE`. The hub answers with the welcome, or with `UNKNOWN_RUN`, and closes the connection.
"""

from __future__ import annotations

import hmac
import os
import pickle
import socket
import struct
from typing import Final, NamedTuple, TypeAlias

MAGIC: Final = b"distributor wire 3\n"
MAX_FRAME: Final = 64 * 2**20
TAG_SIZE: Final = 16
PROBE: Final = 2**32 - 1
UNKNOWN_RUN: Final = b"no run of this hub has that key."
NONCE_SIZE: Final = 32
KEY_SIZE: Final = 8
# Seconds between two heartbeats, which the hub sends and each link's owner answers.
HEARTBEAT_SECONDS: Final = 1.5
# Seconds of silence after which the hub considers a node lost.
#
# TCP repeats what was lost 6 s after the first loss, and then 13 s after it: a node that is cut off
# or stopped for 6 s is not lost.
NODE_LEASE_SECONDS: Final = 9.0
# Seconds after which a node considers a driver lost whose machine does not answer.
#
# It is longer because it ends all ranks, and a machine that is stopped for a while, as a migrating
# virtual machine is, can go on.
DRIVER_LEASE_SECONDS: Final = 30.0

HEADER: Final = struct.Struct(">I")
GREETING: Final = struct.Struct(f">{len(MAGIC)}s{NONCE_SIZE}s")
HELLO: Final = struct.Struct(f">{KEY_SIZE}s4s{NONCE_SIZE}s32s")
WELCOME: Final = struct.Struct(">32s")

# A peer that has vanished while idle is noticed after 15 + 4 * 5 seconds. TCP_USER_TIMEOUT is not
# set: it would also end a connection whose reader pauses, as a hub's does for flow control.
_KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPALIVE": 15,  # what macOS calls TCP_KEEPIDLE
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
}


Frame: TypeAlias = tuple[bytes | memoryview, ...]  # the parts of a frame, in order


class HandshakeRefused(ConnectionError):
    """The other side did not prove that it holds the run's secret, or did not accept our proof."""


class RunNotServed(HandshakeRefused):
    """What answered is certainly not the hub of this run."""


class FrameTooLarge(ConnectionError):
    """A frame is longer than ``MAX_FRAME``, or has the invalid length 0."""


class FrameNotAuthentic(ConnectionError):
    """A frame is not the one that the other side sent next."""


class FrameTags:
    """Computes the tags of the frames of one direction of a connection, in their order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, None, "sha256")
        self._number = 0

    def next(self, *parts: bytes | memoryview) -> bytes:
        """Return the tag of the next frame, which consists of these parts."""
        mac = self._keyed.copy()
        mac.update(self._number.to_bytes(8, "big"))
        for part in parts:
            mac.update(part)
        self._number += 1
        return mac.digest()[:TAG_SIZE]

    def check(self, tag: bytes | memoryview, *parts: bytes | memoryview) -> None:
        """Check the tag of the next frame, which consists of these parts."""
        number = self._number
        if not hmac.compare_digest(tag, self.next(*parts)):
            raise FrameNotAuthentic(
                f"frame {number} of a connection was changed on the way, or another one was put in "
                "its place: the network between driver and nodes is damaged or under attack"
            )


class Session(NamedTuple):
    sent: FrameTags
    received: FrameTags


def hello(secret: bytes, greeting: bytes, nonce: bytes, node: int) -> bytes:
    """Return the hello with which ``node`` answers a hub's greeting."""
    magic, hub_nonce = GREETING.unpack(greeting)
    if magic != MAGIC:
        raise RunNotServed("what answered is not a distributor hub of this version")
    key, index = run_key(secret), HEADER.pack(node)
    return HELLO.pack(key, index, nonce, _hmac(secret, b"client", hub_nonce, nonce, key, index))


def run_key(secret: bytes) -> bytes:
    """Return the key that identifies a secret's run without revealing the secret."""
    return _hmac(secret, b"run")[:KEY_SIZE]


def key_in(answer: bytes | bytearray) -> bytes:
    key: bytes = HELLO.unpack(answer)[0]
    return key


def is_probe(answer: bytes | bytearray) -> bool:
    return bytes(HELLO.unpack(answer)[1]) == HEADER.pack(PROBE)


def admit(secret: bytes, hub_nonce: bytes, answer: bytes | bytearray) -> tuple[int, bytes, Session]:
    """Check a link's hello; return its node index, the welcome to send, and the hub's session."""
    key, index, nonce, proof = HELLO.unpack(answer)
    if not hmac.compare_digest(proof, _hmac(secret, b"client", hub_nonce, nonce, key, index)):
        raise HandshakeRefused("the peer does not hold the run's secret")
    upward, downward = _tags(secret, hub_nonce, nonce)
    welcome = _hmac(secret, b"server", nonce, hub_nonce)
    return HEADER.unpack(index)[0], welcome, Session(sent=downward, received=upward)


def check_welcome(secret: bytes, greeting: bytes, nonce: bytes, welcome: bytes) -> Session:
    """Return the link's session if the hub has proved that it holds the secret."""
    _, hub_nonce = GREETING.unpack(greeting)
    if welcome == UNKNOWN_RUN:
        raise RunNotServed("the hub there serves other runs")
    if not hmac.compare_digest(welcome, _hmac(secret, b"server", nonce, hub_nonce)):
        raise RunNotServed("the hub does not hold the run's secret")
    upward, downward = _tags(secret, hub_nonce, nonce)
    return Session(sent=upward, received=downward)


def encode(message: object) -> Frame:
    """Return a message as a frame, without its tag; a `pickle.PickleBuffer` in it is not copied."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(
        message, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append
    )
    raw = [buffer.raw() for buffer in buffers]
    if len(raw) > 1:
        raise ValueError("a message can refer to one buffer at most")
    length = HEADER.size + len(pickled) + sum(map(len, raw))
    return b"".join((HEADER.pack(check_length(length)), HEADER.pack(len(pickled)), pickled)), *raw


def decode(payload: bytes | memoryview) -> object:
    """Unpickle a payload of an authenticated peer."""
    view = memoryview(payload)
    end = HEADER.size + HEADER.unpack_from(view)[0]
    return pickle.loads(view[HEADER.size : end], buffers=[view[end:]])


def check_length(length: int) -> int:
    if not 0 < length <= MAX_FRAME:
        raise FrameTooLarge(f"a frame of {length} bytes; 1 to {MAX_FRAME} are allowed")
    return length


def tune(sock: socket.socket) -> None:
    """Send small frames immediately, and have the kernel detect a peer that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _tags(secret: bytes, hub_nonce: bytes, nonce: bytes) -> tuple[FrameTags, FrameTags]:
    """Return the tags of the frames to the hub, and of those from it."""
    upward = _hmac(secret, b"frames to the hub", hub_nonce, nonce)
    return FrameTags(upward), FrameTags(_hmac(secret, b"frames of the hub", hub_nonce, nonce))


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


# A rank's exception may hold a secret in its arguments. If its node has no link, it reaches the
# driver inside the error of a Spark task, which Spark also writes to its event log, its UI and the
# executors' logs. Those outlive the run and are read by more people than the driver's own output,
# so the payload is sealed with the run's secret, which only the driver and its tasks hold.
#
# The construction is encrypt-then-MAC from HMAC-SHA256 alone, since the standard library has no
# cipher. HMAC over a random nonce and a counter is a pseudorandom function, and its outputs, one
# after the other, are the keystream of a stream cipher in counter mode. Encryption and
# authentication use separate keys, derived from the secret. A sealed payload is::
#
#     nonce (16 bytes) | ciphertext | tag (32 bytes): HMAC(key for tags, nonce | ciphertext)
#
# Use it for payloads of about 100 kB: every 32 bytes cost one HMAC.

NONCE_BYTES, TAG_BYTES, BLOCK_BYTES = 16, 32, 32


class NotAuthentic(ValueError):
    """A payload was not sealed with this secret, or has been changed or truncated."""


def seal(payload: bytes, secret: bytes) -> bytes:
    """Encrypt and authenticate a payload."""
    nonce = os.urandom(NONCE_BYTES)
    sealed = nonce + _xor(payload, nonce, secret)
    return sealed + _tag(sealed, secret)


def unseal(sealed: bytes, secret: bytes) -> bytes:
    """Return the payload that was given to `seal`."""
    body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
    if len(body) < NONCE_BYTES or not hmac.compare_digest(tag, _tag(body, secret)):
        raise NotAuthentic("The payload was not sealed with this secret, or was changed since.")
    return _xor(body[NONCE_BYTES:], body[:NONCE_BYTES], secret)


def rank_secret(secret: bytes) -> bytes:
    """Return the secret of a run's ranks, from which that of its nodes cannot be computed."""
    return _hmac(secret, b"distributor: ranks")


def _tag(body: bytes, secret: bytes) -> bytes:
    return _hmac(_hmac(secret, b"distributor: authenticate"), body)


def _xor(data: bytes, nonce: bytes, secret: bytes) -> bytes:
    """Apply the keystream: encrypts and decrypts."""
    key = _hmac(secret, b"distributor: encrypt")
    blocks = range(-(-len(data) // BLOCK_BYTES))
    stream = b"".join(_hmac(key, nonce + block.to_bytes(8, "big")) for block in blocks)
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream[: len(data)], "big")
    return mixed.to_bytes(len(data), "big")
