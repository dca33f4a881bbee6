"""Ends a rank's process: flushes all output, and skips the interpreter's teardown."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import stat
import sys
import traceback
from typing import NoReturn


def flush_open_files() -> None:
    """Flush the files that the program has not closed, as the interpreter's teardown would."""
    writers = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}
    for file in [found for found in gc.get_objects() if type(found) in writers]:
        with contextlib.suppress(Exception):  # closed, or a wrapper of the user's own object
            # Regular files only: to flush a pipe that nobody reads would block.
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.flush()


def exit_process(exit_code: int) -> NoReturn:
    """Exit without the interpreter's teardown, which costs time and can abort in C++ code."""
    flush_streams()
    os._exit(exit_code)


def flush_streams() -> None:
    """Flush what Python and C code have printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def exit_code_of(error: SystemExit) -> int:
    """Return the exit code that the interpreter would use; print a message as it would."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print_error(f"{error.code}\n")
    return 1


def print_error(text: str) -> None:
    """Print to stderr, if there still is one."""
    with contextlib.suppress(Exception):  # closed, or replaced by the user and broken
        sys.stderr.write(text)


def exit_forked_child(error: BaseException | None) -> NoReturn:
    """End a process that the user's program forked and that returned from the program.

    It must not record an outcome in place of its rank.
    """
    if isinstance(error, SystemExit):
        exit_process(exit_code_of(error))
    if error is not None:
        print_error("".join(traceback.format_exception(error)))
    exit_process(0 if error is None else 1)
