"""Relays what a node's ranks print and report, from the files into which they write it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from distributor.core.text import Redaction
from distributor.node.agent.worker_handle import STANDARD_STREAMS, WorkerHandle
from distributor.rank import messages
from distributor.serialization.oob_pickle import give_back
from distributor.serialization.outcome import Failure
from distributor.wire.messages import Source, Stream


class AgentListener(Protocol):
    """Receives what the ranks of one node print and report, and the events of their lives.

    All methods are called on the thread that runs `Agent.run`, and must not block.
    """

    def write(self, rank: int, source: Source, data: bytes) -> None:
        """Receive what a rank has printed or reported."""

    def has_room(self) -> bool:
        """Return whether `write` can take more now; if not, the bytes stay in the rank's file."""

    def send(self, message: object) -> None:
        """Send a message to the driver, if there is a link."""

    def on_rank_failed(self, failure: Failure) -> bool:
        """Called for each failure, in the order in which the failures become known.

        Returns whether the driver alone decides what follows.
        """

    def on_work_done(self) -> None:
        """Called once, when every rank of the node has done its work.

        Rank 0 then still serves the rendezvous store, until `Agent.release`.
        """


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
            if (rank, stream) not in self._files:
                path = self._folder / f"rank{rank}.{stream}"
                self._files[rank, stream] = path.open("ab", buffering=0)
            file = self._files[rank, stream]
            while written < len(marker) + len(data):
                written += file.write((marker + data)[written:])
        except OSError as error:
            unwritten = len(data) - max(0, written - len(marker))
            self._num_missing[rank, stream] = missing + unwritten
            if not self._has_warned:
                self._has_warned = True
                where = f"distributor: output cannot be written to {self._folder}"
                print(f"{where}, but the run goes on: {error}", file=sys.stderr)

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
    sink : AgentListener
        Receives the output.
    redaction : Redaction
        Removes secrets from what the ranks print.
    """

    def __init__(self, sink: AgentListener, redaction: Redaction) -> None:
        self._sink = sink
        self._redaction = redaction
        self._num_bytes = 0

    def relay(self, workers: Sequence[WorkerHandle], last: bool = False) -> bool:
        """Pass on what ranks have written since the last call, and return whether there is more."""
        more = False
        for worker, source, file in _files(workers):
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

    def drain(self, ended: Sequence[WorkerHandle]) -> None:
        """Pass on all that is left of ranks, or how much there is if the sink makes no room.

        What a rank writes meanwhile may be left out, so they must have ended.
        """
        deadline, relayed = time.monotonic() + DRAIN_SECONDS, self._num_bytes
        while (unread := _unread(ended)) and time.monotonic() < deadline:
            self.relay(ended, last=True)
            if self._num_bytes > relayed:
                deadline, relayed = time.monotonic() + DRAIN_SECONDS, self._num_bytes
            else:
                time.sleep(FULL_PAUSE)
        for worker, source, left in unread:
            worker.relayed[source] += left
            stream = source if source in STANDARD_STREAMS else "stderr"
            marker = GAP_MARKER.format(left, source, DRAIN_SECONDS)
            self._sink.write(worker.origin.rank, stream, marker.encode())


def _unread(workers: Sequence[WorkerHandle]) -> list[tuple[WorkerHandle, Source, int]]:
    """Return which files have bytes that were not passed on, and how many."""
    return [
        (worker, source, left)
        for worker, source, file in _files(workers)
        if (left := os.fstat(file.fileno()).st_size - worker.relayed[source]) > 0
    ]


def _files(workers: Sequence[WorkerHandle]) -> Iterator[tuple[WorkerHandle, Source, BinaryIO]]:
    for worker in workers:
        for source, file in worker.output_files.items():
            yield worker, source, file
