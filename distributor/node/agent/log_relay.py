"""Relays what a node's ranks print and report, from the files into which they write it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from distributor.core.redaction import Redaction
from distributor.node.agent.listener import Sink
from distributor.node.agent.system_metrics import SystemMetrics
from distributor.node.agent.worker_handle import STANDARD_STREAMS, WorkerHandle
from distributor.rank import messages
from distributor.serialization.oob_pickle import give_back
from distributor.wire.messages import Source

CHUNK = 256 * 1024
MANY_LINES = 250
"""Lines in one chunk from which on a rank has to print in batches."""
DRAIN_SECONDS = 5.0
"""Seconds to wait for room in the sink, after which the rest of the ranks' output is left out."""
GAP_MARKER = """
... {} bytes of {} are left out here and in log_dir, because the driver received nothing for {:g} s:
... write to a file what must not be lost
"""
FULL_PAUSE = 0.01
"""Seconds between two looks whether a full sink has room."""


class LogRelay:
    """Copies the output of a node's ranks into a sink.

    Parameters
    ----------
    workers : sequence of WorkerHandle
        The node's workers; those that are started later are appended to the same sequence.
    sink : Sink
        Receives the output.
    redaction : Redaction
        Removes secrets from what the ranks print.
    system_metrics : SystemMetrics or None
        Measures the node's utilization, if that is to be reported too.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        sink: Sink,
        redaction: Redaction,
        system_metrics: SystemMetrics | None,
    ) -> None:
        self._workers = workers
        self._sink = sink
        self._redaction = redaction
        self._system_metrics = system_metrics
        self._num_bytes = 0

    def relay(self, last: bool = False) -> bool:
        """Pass on what ranks have written since the last call, and return whether there is more."""
        more = False
        for worker, source, file in self._files():
            if not self._sink.has_room():
                break
            data = os.pread(file.fileno(), CHUNK, worker.relayed[source])
            full, shown, length = len(data) == CHUNK, data, len(data)
            if source in STANDARD_STREAMS:
                shown, length = self._redaction.of_stream(data, last=last and not full)
            if length:
                worker.relayed[source] += length
                self._num_bytes += length
                self._sink.write(worker.origin.rank, source, shown)
                more |= full
                if source == "progress":
                    give_back(file, worker.relayed[source])
                if source in STANDARD_STREAMS and data.count(b"\n") > MANY_LINES:
                    worker.send(messages.MANY_LINES)
        return more

    def drain(self) -> None:
        """Pass on all output that is left, or how much there is if the sink makes no room."""
        deadline, relayed = time.monotonic() + DRAIN_SECONDS, self._num_bytes
        while self._has_unread() and time.monotonic() < deadline:
            self.relay(last=True)
            if self._num_bytes > relayed:
                deadline, relayed = time.monotonic() + DRAIN_SECONDS, self._num_bytes
            else:
                time.sleep(FULL_PAUSE)
        self._mark_unread()

    def _mark_unread(self) -> None:
        for worker, source, file in self._files():
            if left := os.fstat(file.fileno()).st_size - worker.relayed[source]:
                worker.relayed[source] += left
                stream = source if source in STANDARD_STREAMS else "stderr"
                marker = GAP_MARKER.format(left, source, DRAIN_SECONDS)
                self._sink.write(worker.origin.rank, stream, marker.encode())

    def report_system_metrics(self) -> None:
        """Report the node's utilization, if the next sample is due."""
        if self._system_metrics and self._system_metrics.is_due():
            line = self._system_metrics.sample().to_line()
            self._sink.write(self._workers[0].origin.rank, "usage", line)

    def _has_unread(self) -> bool:
        return any(
            os.fstat(file.fileno()).st_size > worker.relayed[source]
            for worker, source, file in self._files()
        )

    def _files(self) -> Iterator[tuple[WorkerHandle, Source, BinaryIO]]:
        for worker in self._workers:
            for source, file in worker.output_files.items():
                yield worker, source, file
