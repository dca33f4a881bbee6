"""Resource trackers, which end by themselves, are recognized among the processes to kill."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from distributor.node.process.signals import is_resource_tracker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


def test_a_resource_tracker_is_recognized_while_it_is_being_executed() -> None:
    """For a moment after a process has another program, it has no command line."""
    own_program = os.readlink("/proc/self/exe")
    for _ in range(500):
        program = ["sh", "-c", "kill -STOP $$", "multiprocessing.resource_tracker"]
        pid = os.posix_spawn("/bin/sh", program, {})
        try:
            while os.readlink(f"/proc/{pid}/exe") == own_program:
                pass  # its parent continues a little earlier, rarely seen: once in 40,000
            assert is_resource_tracker(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_process_that_has_ended_is_no_resource_tracker() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert not is_resource_tracker(pid)
    finally:
        os.waitpid(pid, 0)
    assert not is_resource_tracker(pid)
