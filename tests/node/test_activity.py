"""What counts as activity of a node's ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from distributor.node.agent.activity import ActivityMonitor
from distributor.node.agent.listener import AgentListener

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports CPU times")

ANSWERS = """
import sys, time
for _ in sys.stdin:
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    print("answered", flush=True)
"""
"""A process that uses the CPU for 0.1 s for each line that it reads."""


class Listener(AgentListener):
    def __init__(self) -> None:
        self.idle: list[float] = []

    def on_idle(self, seconds: float) -> None:
        self.idle.append(seconds)


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    """Start a process that answers, as the child of another, as the supervisor's ranks are."""
    parent = (
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", parent, ANSWERS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def await_answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "answered\n"


@pytest.mark.parametrize("is_requested", [True, False])
def test_an_answer_to_a_request_is_no_activity(
    rank: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, is_requested: bool
) -> None:
    class Worker:
        working, output_files, pid = True, dict[str, Any](), rank.pid

        class origin:
            rank = 0

    monkeypatch.setattr("distributor.node.agent.activity.parent_pid", lambda pid: pid)
    listener = Listener()
    workers: Any = [Worker()]
    monitor = ActivityMonitor(workers, listener, 0.0, uses_gpus=False)
    await_answer(rank)  # it has started
    monitor.start()
    while not listener.idle:
        monitor.report_idleness()

    await_answer(rank)
    if is_requested:
        monitor.disregard_latest()
    listener.idle.clear()
    monitor.report_idleness()
    assert [seconds > 0 for seconds in listener.idle] == [is_requested]
