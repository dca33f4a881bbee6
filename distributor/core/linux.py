"""What Linux supports, by trial, and what it reports about processes in ``/proc``.

A sandbox may refuse what Python offers: Linux 5.3 and later support all system calls that are tried
here, but older kernels, gVisor and strict seccomp filters do not. psutil also reads ``/proc``, but
its import would slow down the launch of every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

# The errors by which a kernel or a filter refuses a system call.
REFUSED = {errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL}
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
EXEC_SECONDS = 5.0  # seconds to wait for the command line of a process that is just being executed
_POLL_SECONDS = 0.0005


@functools.cache
def lacking_for_memory_files() -> tuple[str, ...]:
    """Return the system call that files in memory need, and its error, if it is refused."""
    return _refused("memfd_create", lambda: os.close(os.memfd_create("distributor")))


@functools.cache
def lacking_for_supervision() -> tuple[str, ...]:
    """Return the system calls that supervising ranks needs, and their errors, that are refused."""
    if sys.platform != "linux":
        return ("Linux",)
    return (
        *_refused("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid()))),
        *_refused("prctl(PR_SET_CHILD_SUBREAPER)", _try_subreaper),
    )


def set_subreaper(wanted: bool = True) -> None:
    """Become, or cease to be, the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def _try_subreaper() -> None:
    now = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(now))
    set_subreaper(bool(now.value))  # unchanged


def _prctl(option: int, argument: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _refused(name: str, call: Callable[[], object]) -> tuple[str, ...]:
    try:
        call()
    except AttributeError:  # Python was built without it
        return (f"{name} (unknown to this Python)",)
    except OSError as error:
        if error.errno in REFUSED:
            return (f"{name} ({error.strerror})",)
    return ()


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
    """Return the command line of a process, which is empty if the process has ended."""
    # It is also empty for a moment while a process is being executed.
    deadline = time.monotonic() + EXEC_SECONDS
    while not (line := _read(pid, "cmdline")):
        if stat_field(pid, Stat.STATE) in ("Z", "X") or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return line


def _stat(pid: int) -> list[bytes]:
    # The second field, the process's name, is in parentheses and may contain anything.
    before = [b""] * Stat.STATE
    return [*before, *_read(pid, "stat").rpartition(b")")[2].split()]


def _read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()
