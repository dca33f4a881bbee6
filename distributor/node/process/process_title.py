"""Process titles: what ``ps``, ``top`` and ``nvidia-smi`` show in place of a command line.

Linux shows the memory that held the command line when the process was started, so a title is
written over it and never beyond it. The write goes through ``/proc/self/mem``, which reports an
error where a pointer would crash. Python's own copies, such as ``sys.orig_argv``, do not change.
On other systems, and if anything is not as expected, nothing happens.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_PREFIX = "distributor: "
_MOST_BYTES = 256
"""Bytes of a title; the kernel shows at most a page."""
_LEAST_ROOM = 32
"""Bytes of a command line below which a title would say too little."""
_ARG_START, _ARG_END = 45, 46
"""Fields of ``/proc/self/stat`` after the process's name; 48 and 49 in proc(5)."""
_COMM_BYTES = 15
"""Bytes that the kernel keeps of a process's short name."""


def set_title(title: str, comm: str) -> None:
    """Name this process.

    Parameters
    ----------
    title : str
        What the process is, and of which run; cut to the length of the command line.
    comm : str
        Its short name, without spaces (Spark splits ``/proc/<pid>/stat`` at spaces); cut to 15
        bytes.
    """
    _write_title(title)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(_cut(comm.replace(" ", "_"), _COMM_BYTES))


def set_run_title(role: str, program_name: str, run_id: str) -> None:
    """Name this process by its role in a run."""
    comm = f"{role.replace(' ', '')}:{program_name}"
    set_title(_of_run(role, program_name, run_id), comm)


@contextlib.contextmanager
def temporary_run_title(role: str, program_name: str, run_id: str) -> Iterator[None]:
    """Name this process by its role in a run, and restore its command line afterwards.

    Its short name stays, since it is another program's process: Spark counts the memory of its
    Python workers by that name.
    """
    before = _write_title(_of_run(role, program_name, run_id))
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError, ValueError):
                _overwrite(lambda room: before)


def _of_run(role: str, program_name: str, run_id: str) -> str:
    return f"{role} of {program_name} ({run_id})"


def _write_title(title: str) -> bytes | None:
    """Write a title; return what was there before, or None if nothing was written."""
    with contextlib.suppress(OSError, ValueError):
        return _overwrite(lambda room: _padded(_PREFIX + title, room))
    return None


def _padded(title: str, room: int) -> bytes:
    # The kernel shows all of the memory, with its zeros, unless the last byte is not zero.
    return _cut(title, min(room - 2, _MOST_BYTES)).ljust(room - 1, b"\0") + b" "


def _cut(text: str, room: int) -> bytes:
    """Encode a line of printable characters, and cut it between two of them."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable.encode(errors="replace")[:room].decode(errors="ignore").encode()


def _overwrite(content: Callable[[int], bytes]) -> bytes | None:
    if sys.platform != "linux":
        return None
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    room, shown = end - start, Path("/proc/self/cmdline").read_bytes()
    if not (start > 0 and room >= _LEAST_ROOM and shown):
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
