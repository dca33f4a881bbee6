"""The executor's own log as the place of what ranks print."""

from __future__ import annotations

import sys

from distributor.wire.messages import Stream


class ExecutorLog:
    """Writes complete lines to this process's stderr, which Spark stores with the executor's log.

    Cluster managers show it: ``yarn logs``, ``kubectl logs``, and the page of a standalone worker.
    """

    def __init__(self) -> None:
        self._begun: dict[tuple[int, Stream], bytes] = {}

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Write the lines that this completes, each with its rank."""
        *lines, rest = (self._begun.pop((rank, stream), b"") + data).split(b"\n")
        self._print(rank, lines)
        if rest:
            self._begun[rank, stream] = rest

    def close(self) -> None:
        """Write the lines that have not ended."""
        for (rank, _), rest in self._begun.items():
            self._print(rank, [rest])
        self._begun = {}

    def _print(self, rank: int, lines: list[bytes]) -> None:
        sys.stderr.buffer.write(b"".join(b"[%d] %s\n" % (rank, line) for line in lines))
        sys.stderr.flush()
