"""Writes the whole output of ranks to ``log_dir``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

from distributor.wire.messages import Stream

LEFT_OUT = "\n... {} bytes could not be kept here ...\n"


class LogFiles:
    """Appends each rank's output, byte for byte, to files of its attempt.

    They are ``<log_dir>/<run id>/attempt_0/rank3.stdout`` and ``.stderr``, whether the driver or
    a node without a link to it writes them. If the disk is full or gone, the run goes on: that is
    said once, and when writing works again, a line in the file says how much is missing.

    Parameters
    ----------
    log_dir : str or path
        As the user named it; what is missing of the path is created.
    run_id, attempt : str, int
        The run, and which attempt of it, counted from 0.
    """

    def __init__(self, log_dir: str | os.PathLike[str], run_id: str, attempt: int) -> None:
        folder = Path(log_dir, run_id, f"attempt_{attempt}")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[tuple[int, Stream], BinaryIO] = {}
        self._missing: dict[tuple[int, Stream], int] = {}
        self._told = False

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        missing = self._missing.pop((rank, stream), 0)
        told = LEFT_OUT.format(missing).encode() if missing else b""
        written = 0
        try:
            file = self._file(rank, stream)
            while written < len(told) + len(data):
                written += file.write((told + data)[written:])
        except OSError as error:
            self._missing[rank, stream] = missing + len(data) - max(0, written - len(told))
            self._tell(error)

    def _file(self, rank: int, stream: Stream) -> BinaryIO:
        if (rank, stream) not in self._files:
            path = self._folder / f"rank{rank}.{stream}"
            self._files[rank, stream] = path.open("ab", buffering=0)
        return self._files[rank, stream]

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            text = f"distributor: output cannot be kept in {self._folder}, and the run goes on"
            print(f"{text}: {error}", file=sys.stderr)

    def has_room(self) -> bool:
        return True

    def close(self) -> None:
        for file in self._files.values():
            file.close()
