"""A rank's standard streams: flushed at each line, or in batches if it prints very much."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time

BATCH_SECONDS = 0.005
"""Seconds between two writes while there are very many lines: a crash then loses no more."""
QUIET_BATCHES = 20
"""Batches without a line after which each line is written by itself again."""


class Streams:
    """What a rank prints to; made once, before anything is printed."""

    def __init__(self) -> None:
        self._flood = threading.Event()
        self._streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
        for stream in self._streams:
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        os.register_at_fork(before=self._flush, after_in_child=self._by_line)

    def expect_many_lines(self) -> None:
        """Write in batches from now on, until few lines come. From any thread."""
        if not self._flood.is_set():
            self._flood.set()
            threading.Thread(target=self._write_batches, name="batches", daemon=True).start()

    def _write_batches(self) -> None:
        self._reconfigure(line_buffering=False)
        quiet = 0
        while quiet < QUIET_BATCHES:
            time.sleep(BATCH_SECONDS)
            before = self._written()
            self._flush()
            quiet = quiet + 1 if self._written() == before else 0
        self._by_line()

    def _by_line(self) -> None:
        if self._flood.is_set():
            self._reconfigure(line_buffering=True)
            self._flood.clear()

    def _reconfigure(self, line_buffering: bool) -> None:
        for stream in self._streams:
            with contextlib.suppress(ValueError):  # it is closed
                stream.reconfigure(line_buffering=line_buffering)

    def _flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(ValueError):
                stream.flush()

    @staticmethod
    def _written() -> int:
        return sum(os.fstat(descriptor).st_size for descriptor in (1, 2))
