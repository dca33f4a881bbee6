"""Writes the whole output of ranks to ``log_dir``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

from distributor.wire.messages import Stream

GAP_MARKER = "\n... {} bytes could not be written here ...\n"


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
        marker = GAP_MARKER.format(missing).encode() if missing else b""
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
