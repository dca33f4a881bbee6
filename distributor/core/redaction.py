"""Keeps secrets from the ranks' environment out of everything that is shown or stored."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

# Variables that hold secrets, by name; Spark's own ``spark.redaction.regex`` is much the same.
NAMES = re.compile(
    r"secret|passw|token(?!iz)|credential|api_?key|access_?key|private_?key", re.IGNORECASE
)
LEAST = 6  # characters that a value needs to be replaced: shorter values occur everywhere
MASK = "*********(redacted)"  # the replacement, as in Spark


class Redaction:
    """Replaces the secrets of a run in the output of its ranks."""

    def __init__(self, env: Mapping[str, str]) -> None:
        # Longer ones first: one may be a prefix of another.
        self._secrets = sorted(set(_secrets_in(env)), key=len, reverse=True)
        pattern = "|".join(map(re.escape, self._secrets))
        self._in_text = re.compile(pattern) if pattern else None
        self._encoded = [os.fsencode(secret) for secret in self._secrets]
        self._in_bytes = re.compile(os.fsencode(pattern)) if pattern else None

    def of_text(self, text: str) -> str:
        return self._in_text.sub(MASK, text) if self._in_text else text

    def of_stream(self, data: bytes, last: bool) -> tuple[bytes, int]:
        """Return the next part of a stream without secrets, and how many bytes of `data` it is.

        The rest may be the beginning of a secret, unless the data is the stream's `last`.
        """
        if self._in_bytes is None:
            return data, len(data)
        length = len(data) if last else self._settled(self._in_bytes, data)
        return self._in_bytes.sub(MASK.encode(), data[:length]), length

    def _settled(self, secrets: re.Pattern[bytes], data: bytes) -> int:
        """Return how many bytes can be shown whatever follows."""
        begun = len(data) - max(_overlap(data, secret) for secret in self._encoded)
        whole = (found.span() for found in secrets.finditer(data))
        # A complete match that overlaps a possible beginning may be part of a longer secret.
        return min([begun, *(start for start, end in whole if end > begun)])


def _secrets_in(env: Mapping[str, str]) -> Iterator[str]:
    for name, value in env.items():
        if NAMES.search(name):
            # A key of several lines may be printed line by line, or with its newlines escaped.
            yield from (line for line in value.split("\n") if len(line) >= LEAST)


def _overlap(data: bytes, secret: bytes) -> int:
    """Return the length of the longest suffix of `data` that is a proper prefix of `secret`."""
    at = max(0, len(data) - len(secret) + 1)
    while (at := data.find(secret[:LEAST], at)) >= 0:  # comparing all suffixes takes seconds
        if memoryview(data)[at:] == memoryview(secret)[: len(data) - at]:
            return len(data) - at
        at += 1
    longest = min(len(data), LEAST - 1)
    return next((n for n in range(longest, 0, -1) if data.endswith(secret[:n])), 0)
