"""Signals processes that are not children of this one, and reads their state from Linux."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from distributor._compat.cpython import RESOURCE_TRACKER

RESOURCE_TRACKER_SECONDS = 5.0
"""Seconds to wait for Python's cleaner of shared memory once all whom it serves are dead.

It is never killed: then what it was to remove would stay until the machine restarts. On a machine
that is short of processor time or memory, its start alone may take longer.
"""
EXECUTION_SECONDS = 5.0
"""Seconds within which a process that was executed has a command line, unless it wants none."""
TICK = 0.005


def signal_group(leader: int, signum: int) -> None:
    """Signal a process group, unless nobody is left in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(leader, signum)
        except ProcessLookupError:
            os.kill(leader, signum)  # just forked, it may not lead its group yet


def kill_group(leader: int) -> None:
    """Kill a process group, less trackers; this process last, if it is of that group."""
    if sys.platform != "linux":
        os.killpg(leader, signal.SIGKILL)
        return
    doomed = [
        pid for pid in all_processes() if group_of(pid) == leader and not is_resource_tracker(pid)
    ]
    for pid in sorted(doomed, key=lambda pid: pid == os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def kill_by_environment(variables: Mapping[str, str]) -> None:
    """Kill every process of this user that was started with these variables."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    assert wanted, "all processes have no variables at all"
    until = time.monotonic() + RESOURCE_TRACKER_SECONDS
    while found := [pid for pid in all_processes() if wanted <= _environment_of(pid)]:
        for pid in found:
            if not is_resource_tracker(pid):
                with contextlib.suppress(OSError):  # another user's, or gone by now
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return
        time.sleep(TICK)


def _environment_of(pid: int) -> set[bytes]:
    try:
        return set(_read(pid, "environ").split(b"\0"))
    except OSError:
        return set()


def is_resource_tracker(pid: int) -> bool:
    """Tell Python's cleaner of shared memory, which ends by itself once all whom it serves have."""
    try:
        return RESOURCE_TRACKER in _command_line(pid)
    except OSError:
        return False


def _command_line(pid: int) -> bytes:
    """Read what a process runs; while it is being executed, Linux does not tell that yet."""
    until = time.monotonic() + EXECUTION_SECONDS
    while not (line := _read(pid, "cmdline")) and time.monotonic() < until and not _has_ended(pid):
        time.sleep(TICK / 10)
    return line


def _has_ended(pid: int) -> bool:
    """Tell whether a process is a zombie, or about to be one."""
    return _read(pid, "stat").rpartition(b")")[2].split()[0] in (b"Z", b"X")


def ignores(pid: int, signum: int) -> bool:
    """Tell whether a signal would be lost on a process; only Linux tells."""
    try:
        return is_in_signal_mask(pid, "SigIgn", signum)
    except OSError:
        return False


def is_in_signal_mask(pid: int, mask: str, signum: int) -> bool:
    """Look for a signal in one of a process's masks, named as Linux does: SigIgn, SigCgt.

    Raises
    ------
    OSError
        Where the process has gone, or the system does not tell.
    """
    signals = _read(pid, "status").partition(f"{mask}:".encode())[2].split()[0]
    return bool(int(signals, 16) >> (signum - 1) & 1)


def group_of(pid: int) -> int:
    """Give the process group of a process; 0 where it has gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _read(pid: int, what: str) -> bytes:
    return Path(f"/proc/{pid}/{what}").read_bytes()


def all_processes() -> list[int]:
    """List the processes of this system; only Linux tells."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
