"""A rank's standard streams: flushed at each line, or in batches if it prints very much."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time

BATCH_SECONDS = 0.005
"""Seconds between two writes while a rank prints very many lines; a crash loses no more."""
QUIET_BATCHES = 20
"""Batches without output after which each line is written at once again."""


class StandardStreams:
    """Stdout and stderr of a rank; created once, before anything is printed."""

    def __init__(self) -> None:
        self._in_batches = False
        self._streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
        for stream in self._streams:
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        # A child that is forked while another thread flushes would wait for its lock forever.
        self._lock = threading.Lock()
        os.register_at_fork(
            before=self._prepare_fork,
            after_in_parent=self._lock.release,
            after_in_child=self._begin_in_child,
        )

    def expect_many_lines(self) -> None:
        """Write in batches from now on, until output slows down. Can be called from any thread."""
        with self._lock:
            if self._in_batches:
                return
            self._in_batches = True
            self._reconfigure(line_buffering=False)
        threading.Thread(target=self._write_batches, name="batches", daemon=True).start()

    def _prepare_fork(self) -> None:
        self._lock.acquire()
        self._flush()

    def _begin_in_child(self) -> None:
        self._lock.release()
        self._write_by_line()

    def _write_batches(self) -> None:
        quiet = 0
        while quiet < QUIET_BATCHES:
            time.sleep(BATCH_SECONDS)
            before = self._file_sizes()
            with self._lock:
                self._flush()
            quiet = quiet + 1 if self._file_sizes() == before else 0
        with self._lock:
            self._write_by_line()

    def _write_by_line(self) -> None:
        if self._in_batches:
            self._reconfigure(line_buffering=True)
            self._in_batches = False

    def _reconfigure(self, line_buffering: bool) -> None:
        for stream in self._streams:
            with contextlib.suppress(ValueError):  # it is closed
                stream.reconfigure(line_buffering=line_buffering)

    def _flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(ValueError):
                stream.flush()

    @staticmethod
    def _file_sizes() -> int:
        return sum(os.fstat(descriptor).st_size for descriptor in (1, 2))
