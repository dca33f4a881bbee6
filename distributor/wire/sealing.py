"""Authenticated encryption of small payloads that pass through places others can read.

A rank's exception may hold a secret in its arguments. It reaches the driver inside the error of a
Spark task, which Spark also writes to its event log, its UI and the executors' logs. Those outlive
the run and are read by more people than the driver's own output, so the payload is sealed with the
run's secret, which only the driver and the tasks of this run hold.

The construction is encrypt-then-MAC from HMAC-SHA256 alone, since the standard library has no
cipher. HMAC over a random nonce and a counter is a pseudorandom function, and its outputs, one
after the other, are the keystream of a stream cipher in counter mode. Encryption and
authentication use separate keys, derived from the secret. A sealed payload is::

    nonce (16 bytes) | ciphertext | tag (32 bytes): HMAC(key for tags, nonce | ciphertext)

Use it for payloads of about 100 kB: every 32 bytes cost one HMAC.
"""

from __future__ import annotations

import hmac
import os

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


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
