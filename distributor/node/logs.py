"""The ranks' whole output, kept as files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from distributor.wire.messages import Stream

LEFT_OUT = "\n... {} bytes could not be kept here ...\n"


class LogFiles:
    """Appends each rank's output, byte for byte, to ``rank3.stdout`` and ``rank3.stderr``.

    Where the disk is full or gone, the run goes on: that is said once, and a line in the file tells
    how much is missing where writing works again.

    Parameters
    ----------
    folder : Path
        Where the files go; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
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

    def room(self) -> bool:
        return True

    def close(self) -> None:
        for file in self._files.values():
            file.close()
