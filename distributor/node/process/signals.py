"""Sends signals to processes, most of which are not children of this one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping

from distributor._compat.cpython import RESOURCE_TRACKER
from distributor.core.linux import (
    all_pids,
    command_line_of,
    environment_of,
    is_in_signal_mask,
)

# A resource tracker of multiprocessing is never killed, because the shared memory that it should
# remove would then stay until the machine restarts. After all its clients have ended, it is waited
# for. On a machine that is short of CPU time or memory, its start alone may take longer.
RESOURCE_TRACKER_SECONDS = 5.0
POLL_SECONDS = 0.005


def kill(pid: int) -> None:
    """Kill a process, if it still exists and is this user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def signal_group(leader: int, signum: int) -> None:
    """Send a signal to a process group, if any of its processes is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(leader, signum)
        except ProcessLookupError:
            os.kill(leader, signum)  # just after its fork it may not lead a group yet


def kill_group(leader: int) -> None:
    """Kill a process group except for resource trackers; if this process is in it, kill it last."""
    if sys.platform != "linux":
        os.killpg(leader, signal.SIGKILL)
        return
    members = [pid for pid in all_pids() if process_group_of(pid) == leader]
    doomed = [pid for pid in members if not is_resource_tracker(pid)]
    for pid in sorted(doomed, key=lambda pid: pid == os.getpid()):
        kill(pid)


def kill_by_environment(variables: Mapping[str, str]) -> None:
    """Kill all processes of this user that were started with these variables.

    Resource trackers are waited for instead.
    """
    wanted = {os.fsencode(f"{name}={value}") for name, value in variables.items()}
    assert wanted, "every process would match"
    deadline = time.monotonic() + RESOURCE_TRACKER_SECONDS
    while found := [pid for pid in all_pids() if wanted <= environment_of(pid)]:
        for pid in found:
            if not is_resource_tracker(pid):
                kill(pid)
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def is_resource_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker.

    It removes shared memory that its clients have left behind, and exits once all of them have.
    """
    try:
        return RESOURCE_TRACKER in command_line_of(pid)
    except OSError:
        return False


def ignores_signal(pid: int, signum: int) -> bool:
    """Return whether a process ignores a signal; False on systems other than Linux."""
    try:
        return is_in_signal_mask(pid, "SigIgn", signum)
    except OSError:
        return False


def process_group_of(pid: int) -> int:
    """Return the process group of a process; 0 if the process is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0
