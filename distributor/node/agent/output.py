"""Relays what a node's ranks print and report, from the files into which they write it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from distributor.core.text import Redaction
from distributor.node.agent.system_metrics import SystemMetrics
from distributor.node.agent.worker_handle import STANDARD_STREAMS, WorkerHandle
from distributor.rank import messages
from distributor.serialization.oob_pickle import give_back
from distributor.serialization.outcome import Failure
from distributor.wire.messages import Source, Stream


class Sink(Protocol):
    """Receives what ranks print and report."""

    def write(self, rank: int, source: Source, data: bytes) -> None: ...

    def has_room(self) -> bool:
        """Return whether the sink can take more now; if not, the bytes stay in the rank's file."""


class AgentListener(Sink, Protocol):
    """Receives what the ranks of one node print and report, and the events of their lives.

    All methods are called on the thread that runs `Agent.run`, and must not block.
    """

    def on_ranks_started(self) -> None:
        """Called once, when every rank of the node has begun its work."""

    def on_rank_failed(self, failure: Failure) -> None:
        """Called for each failure, in the order in which the failures become known."""

    def on_idle(self, seconds: float) -> None:
        """Called again and again while all ranks are idle, with the seconds since they are.

        It is called with 0.0 once they are active again.
        """

    def on_stacks(self, stacks: dict[int, str]) -> None:
        """Called after `Agent.request_stacks`, with the stacks of the active ranks, by rank."""

    def on_work_done(self) -> None:
        """Called once, when every rank of the node has done its work.

        Rank 0 then still serves the rendezvous store, until `Agent.release`.
        """

    def on_preemption_subscribed(self) -> None:
        """Called when a rank subscribes to preemption notices."""

    def on_sigterm(self) -> None:
        """Called when a rank that subscribes to preemption notices has received SIGTERM."""


UNWRITTEN = "\n... {} bytes could not be written here ...\n"


class LogFiles:
    """Appends each rank's output, byte for byte, to files of its attempt.

    They are ``<log_dir>/<run id>/attempt_0/rank3.stdout`` and ``.stderr``. Either the driver writes
    them, or a node that has no link to the driver. If the disk is full or no longer mounted, the
    run goes on: the user is warned once, and when writing works again, a line in the file says how
    many bytes are missing.

    Parameters
    ----------
    log_dir : str or path
        The user's ``log_dir``. Missing folders are created.
    run_id, attempt : str, int
        The run, and the number of its attempt, counted from 0.
    """

    def __init__(self, log_dir: str | os.PathLike[str], run_id: str, attempt: int) -> None:
        folder = Path(log_dir, run_id, f"attempt_{attempt}")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[tuple[int, Stream], BinaryIO] = {}
        self._num_missing: dict[tuple[int, Stream], int] = {}
        self._has_warned = False

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Append bytes to the file of a rank's stream."""
        missing = self._num_missing.pop((rank, stream), 0)
        marker = UNWRITTEN.format(missing).encode() if missing else b""
        written = 0
        try:
            file = self._file(rank, stream)
            while written < len(marker) + len(data):
                written += file.write((marker + data)[written:])
        except OSError as error:
            unwritten = len(data) - max(0, written - len(marker))
            self._num_missing[rank, stream] = missing + unwritten
            self._warn(error)

    def _file(self, rank: int, stream: Stream) -> BinaryIO:
        if (rank, stream) not in self._files:
            path = self._folder / f"rank{rank}.{stream}"
            self._files[rank, stream] = path.open("ab", buffering=0)
        return self._files[rank, stream]

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = f"distributor: output cannot be written to {self._folder}, but the run goes on"
            print(f"{text}: {error}", file=sys.stderr)

    def has_room(self) -> bool:
        return True

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


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
