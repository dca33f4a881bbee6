"""The ranks' whole output, kept as files."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from distributor.wire.messages import Stream


class LogFiles:
    """Appends each rank's output, byte for byte, to ``rank3.stdout`` and ``rank3.stderr``.

    Parameters
    ----------
    folder : Path
        Where the files go; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[tuple[int, Stream], BinaryIO] = {}

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        file = self._files.get((rank, stream))
        if file is None:
            path = self._folder / f"rank{rank}.{stream}"
            file = self._files[rank, stream] = path.open("ab", buffering=0)
        file.write(data)

    def room(self) -> bool:
        return True

    def close(self) -> None:
        for file in self._files.values():
            file.close()
