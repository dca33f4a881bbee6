"""An agent and real ranks, in situations that no whole run reaches reliably."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
from support.waiting import until

from distributor.node.agent.agent import Agent
from distributor.node.agent.listener import AgentListener
from distributor.node.agent.share import NodeShare
from distributor.node.process import zygote
from distributor.node.process.spawner import Process, Spawner, StartLimit
from distributor.programs.programs import program_of
from distributor.serialization.outcome import Failure
from distributor.serialization.program import Program, in_file

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Recorder(AgentListener):
    """Records the ranks that fail; at the first failure it kills rank 0."""

    def __init__(self, rank_0_is_active: Path) -> None:
        self._rank_0_is_active = rank_0_is_active
        self.processes: list[Process] = []
        self.failed_ranks: list[int] = []

    def write(self, rank: int, source: object, data: bytes) -> None:
        pass

    def has_room(self) -> bool:
        return True

    def on_rank_failed(self, failure: Failure) -> None:
        self.failed_ranks.append(failure.origin.rank)
        if self.failed_ranks == [1]:
            until(self._rank_0_is_active.exists, "rank 0 is active")
            rank_0 = self.processes[0]
            rank_0.kill()
            assert rank_0.join(10), "rank 0 has ended"


class RecordingSpawner:
    """A spawner that keeps the processes that it has started in a list."""

    def __init__(self, spawner: Spawner, processes: list[Process]) -> None:
        self._spawner = spawner
        self._processes = processes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spawner, name)

    def start(self, *args: Any, **kwargs: Any) -> Process:
        self._processes.append(self._spawner.start(*args, **kwargs))
        return self._processes[-1]


def wait_or_exit(marker: Path) -> None:
    if os.environ["RANK"] == "0":
        marker.touch()
        signal.pause()
    os._exit(3)


@contextlib.contextmanager
def agent_of(
    listener: AgentListener, program: Program, ranks: int, processes: list[Process]
) -> Iterator[Agent]:
    """Create an agent of warm ranks, whose processes are recorded."""
    with socket.create_server(("127.0.0.1", 0)) as store_socket:
        node = NodeShare(
            run_id="of-a-test",
            host="here",
            address="127.0.0.1",
            ranks_per_node=ranks,
            master_addr="127.0.0.1",
            master_port=store_socket.getsockname()[1],
            secret=bytes(32),
        )
        with in_file(program) as file, zygote.open_spawner(None, StartLimit()) as spawner:
            recording: Any = RecordingSpawner(spawner, processes)
            with Agent(node, file, recording, listener, store_socket=store_socket) as agent:
                yield agent


def test_a_rank_that_dies_while_another_failure_is_handled_is_reported_too(tmp_path: Path) -> None:
    """No process runs any longer then, and the agent has yet to look at one of them."""
    recorder = Recorder(tmp_path / "marker")

    program = program_of(wait_or_exit, (tmp_path / "marker",), {})
    with agent_of(recorder, program, 2, recorder.processes) as agent:
        outcomes = agent.run()

    assert recorder.failed_ranks == [1, 0]
    assert [each.origin.rank for each in outcomes if isinstance(each, Failure)] == [1, 0]
