"""Reads what Linux reports about processes in ``/proc``.

psutil can do this too, but its import would slow down the launch of every rank.
"""

from __future__ import annotations

import contextlib
import os
import time
from enum import IntEnum
from pathlib import Path

EXEC_SECONDS = 5.0
"""Seconds to wait for the command line of a process that is just being executed."""
_POLL_SECONDS = 0.0005


class Stat(IntEnum):
    """Fields of ``/proc/<pid>/stat``, numbered as in proc(5)."""

    STATE = 3
    PARENT_PID = 4
    USER_TIME = 14
    REAPED_SYSTEM_TIME = 17
    START_TIME = 22
    ARG_START = 48
    ARG_END = 49


def all_pids() -> list[int]:
    """List the processes of this system."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def child_pids() -> list[int]:
    """List the children of this process, which must have only one thread."""
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    if file.exists():
        return [int(pid) for pid in file.read_text().split()]
    return [pid for pid in all_pids() if parent_pid(pid) == os.getpid()]


def parent_pid(pid: int) -> int:
    """Return the parent of a process; 0 if the process has ended."""
    try:
        return int(stat_field(pid, Stat.PARENT_PID))
    except OSError:
        return 0


def stat_field(pid: int, field: Stat) -> str:
    """Return one field of ``/proc/<pid>/stat``."""
    return _stat(pid)[field].decode()


def cpu_seconds_of_descendants(ancestor: int) -> float:
    """Return the CPU time of all descendants of a process, including children that they reaped."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for pid in all_pids():
        with contextlib.suppress(OSError):  # it has ended
            stat = _stat(pid)
            children.setdefault(int(stat[Stat.PARENT_PID]), []).append(pid)
            ticks[pid] = sum(map(int, stat[Stat.USER_TIME : Stat.REAPED_SYSTEM_TIME + 1]))
    total, unseen = 0, [ancestor]
    while unseen:
        found = children.pop(unseen.pop(), [])
        total += sum(ticks[pid] for pid in found)
        unseen += found
    return total / os.sysconf("SC_CLK_TCK")


def status_field(pid: int, name: str) -> str:
    """Return one line of ``/proc/<pid>/status``; empty if the system does not report it."""
    for line in _read(pid, "status").decode(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


def is_in_signal_mask(pid: int, mask: str, signum: int) -> bool:
    """Return whether a signal is in one of a process's masks, such as SigIgn or SigCgt."""
    signals = int(status_field(pid, mask) or "0", 16)
    return bool(signals >> (signum - 1) & 1)


def environment_of(pid: int) -> set[bytes]:
    """Return the variables that a process was started with; none if they cannot be read."""
    try:
        return set(_read(pid, "environ").split(b"\0"))
    except OSError:
        return set()


def command_line_of(pid: int) -> bytes:
    """Return the command line of a process, which is empty if the process has ended.

    It is also empty for a moment while a process is being executed; this waits until it is there.
    """
    deadline = time.monotonic() + EXEC_SECONDS
    while not (line := _read(pid, "cmdline")):
        if _has_ended(pid) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return line


def _has_ended(pid: int) -> bool:
    return stat_field(pid, Stat.STATE) in ("Z", "X")


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/<pid>/stat``, to be indexed by `Stat`."""
    # The second field, the process's name, is in parentheses and may contain anything.
    before = [b""] * Stat.STATE
    return [*before, *_read(pid, "stat").rpartition(b")")[2].split()]


def _read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()
