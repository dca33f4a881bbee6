"""Relays what a node's ranks print and report, from the files that they write."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from distributor.core.redaction import Redaction
from distributor.node.agent.sink import Sink
from distributor.node.agent.system_metrics import SystemMetrics
from distributor.node.agent.worker_handle import PRINTED, Rank
from distributor.node.worker import control_channel
from distributor.serialization.oob_pickle import give_back
from distributor.wire.messages import Source

CHUNK = 256 * 1024
MANY_LINES = 250
"""Lines between two looks from which on a rank is to print in batches."""
DRAIN_SECONDS = 5.0
"""Seconds without room in the sink after which the rest of ranks that have ended is left."""


class LogRelay:
    """A node's output, and its way into a sink.

    Parameters
    ----------
    ranks : sequence of Rank
        Whose; those that are yet to be started come into it later.
    sink : Sink
        Where it goes.
    redaction : Redaction
        Keeps secrets out of it.
    usage : SystemMetrics or None
        What the node does, if that is to be told, too.
    """

    def __init__(
        self, ranks: Sequence[Rank], sink: Sink, redaction: Redaction, usage: SystemMetrics | None
    ) -> None:
        self._ranks = ranks
        self._sink = sink
        self._redaction = redaction
        self._usage = usage

    def pass_on(self, last: bool = False) -> bool:
        """Hand on what was printed and told since the last time; tell whether there is more.

        Parameters
        ----------
        last : bool
            Whether nothing follows, so that the beginning of a secret is none.
        """
        more = False
        for rank, source, file in self._files():
            if not self._sink.has_room():
                break
            data = os.pread(file.fileno(), CHUNK, rank.passed_on[source])
            full, shown, length = len(data) == CHUNK, data, len(data)
            if source in PRINTED:
                shown, length = self._redaction.of_stream(data, last=last and not full)
            if length:
                rank.passed_on[source] += length
                self._sink.write(rank.origin.rank, source, shown)
                more |= full
                if source == "progress":
                    give_back(file, rank.passed_on[source])
                if source in PRINTED and data.count(b"\n") > MANY_LINES:
                    rank.tell(control_channel.MANY_LINES)
        return more

    def drain(self) -> None:
        """Hand on the rest."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._unread() and (self.pass_on(last=True) or time.monotonic() < deadline):
            pass

    def tell_usage(self) -> None:
        """Tell what the node does, where that is due."""
        if self._usage and self._usage.due():
            self._sink.write(self._ranks[0].origin.rank, "usage", self._usage.look().to_line())

    def _unread(self) -> bool:
        return any(
            os.fstat(file.fileno()).st_size > rank.passed_on[source]
            for rank, source, file in self._files()
        )

    def _files(self) -> Iterator[tuple[Rank, Source, BinaryIO]]:
        for rank in self._ranks:
            for source, file in rank.told.items():
                yield rank, source, file
