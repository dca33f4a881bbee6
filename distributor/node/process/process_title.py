"""Process titles: what ``ps``, ``top`` and ``nvidia-smi`` show in place of a command line.

Linux shows the memory that held the command line when the process was started, so a title is
written over it and never beyond it. The write goes through ``/proc/self/mem``, which reports an
error in cases in which a write through a pointer would crash. Python's own copies, such as
``sys.orig_argv``, do not change. On other systems, and if anything is not as expected, nothing
happens.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from distributor.core.linux import Stat, stat_field

_PREFIX = "distributor: "
_MAX_TITLE_BYTES = 256  # the kernel shows at most a page
_MIN_COMMAND_LINE_BYTES = 32  # below, there is no room for a meaningful title
_MAX_COMM_BYTES = 15  # to which the kernel cuts a process's short name


def set_title(title: str, comm: str) -> None:
    """Set the title, cut to the length of the command line, and the short name of this process."""
    _write_title(title)
    with contextlib.suppress(OSError):
        # Without spaces, at which Spark splits `/proc/<pid>/stat`.
        Path("/proc/self/comm").write_bytes(_cut(comm.replace(" ", "_"), _MAX_COMM_BYTES))


def set_run_title(role: str, program_name: str, run_id: str) -> None:
    """Set the title and the short name of this process to its role in a run."""
    comm = f"{role.replace(' ', '')}:{program_name}"
    set_title(_run_title(role, program_name, run_id), comm)


@contextlib.contextmanager
def temporary_run_title(role: str, program_name: str, run_id: str) -> Iterator[None]:
    """Set the title of this process to its role in a run, and restore the command line afterwards.

    The short name does not change, because the process belongs to another program: Spark counts
    the memory of its Python workers by that name.
    """
    before = _write_title(_run_title(role, program_name, run_id))
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError, ValueError):
                _overwrite(lambda room: before)


def _run_title(role: str, program_name: str, run_id: str) -> str:
    return f"{role} of {program_name} ({run_id})"


def _write_title(title: str) -> bytes | None:
    """Write a title; return the memory's content before, or None if nothing was written."""
    with contextlib.suppress(OSError, ValueError):
        return _overwrite(lambda room: _pad(_PREFIX + title, room))
    return None


def _pad(title: str, room: int) -> bytes:
    # If the last byte is zero, the kernel shows the whole memory, including the zeros.
    return _cut(title, min(room - 2, _MAX_TITLE_BYTES)).ljust(room - 1, b"\0") + b" "


def _cut(text: str, room: int) -> bytes:
    """Encode text as one printable line, and cut it between two characters."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable.encode(errors="replace")[:room].decode(errors="ignore").encode()


def _overwrite(content: Callable[[int], bytes]) -> bytes | None:
    """Overwrite the memory of the command line; return its content before, or None if it is odd."""
    if sys.platform != "linux":
        return None
    pid = os.getpid()
    start, end = int(stat_field(pid, Stat.ARG_START)), int(stat_field(pid, Stat.ARG_END))
    room, shown = end - start, Path("/proc/self/cmdline").read_bytes()
    if not (start > 0 and room >= _MIN_COMMAND_LINE_BYTES and shown):
        return None
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(memory, room, start)
        after = content(room)
        if not (before.startswith(shown) and len(before) == len(after) == room):
            return None
        os.pwrite(memory, after, start)
        return before
    finally:
        os.close(memory)
