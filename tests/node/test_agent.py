"""An agent and real ranks, at moments to which no run comes reliably."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import cloudpickle
from support.waiting import until

from distributor.launch.programs import program_of
from distributor.node.agent.agent import Agent
from distributor.node.agent.node_spec import NodeSpec
from distributor.node.process import zygote_client
from distributor.node.process.interpreter import Interpreter
from distributor.node.process.spawner import Process, Spawner
from distributor.serialization.outcome import Failure
from distributor.serialization.program import in_file

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Silence:
    """Takes what ranks print."""

    def write(self, rank: int, source: object, data: bytes) -> None:
        pass

    def has_room(self) -> bool:
        return True


class Remembering:
    """A spawner that remembers what it has started."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self.processes: list[Process] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spawner, name)

    def start(self, *args: Any) -> Process:
        self.processes.append(self._spawner.start(*args))
        return self.processes[-1]


def wait_or_die(there: Path) -> None:
    if os.environ["RANK"] == "0":
        there.touch()
        signal.pause()
    os._exit(3)


def test_who_dies_while_another_is_looked_at_is_told_of_too(tmp_path: Path) -> None:
    """The agent then has no process left to wait for, and one that it has not looked at."""
    there, heard = tmp_path / "there", []

    def hear(failure: Failure) -> None:
        heard.append(failure.origin.rank)
        if heard == [1]:
            until(there.exists, "rank 0 is at work")
            rank_0 = spawner.processes[0]
            rank_0.kill()
            assert rank_0.join(10), "it has ended"

    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = NodeSpec(
            run_id="of-a-test",
            host="here",
            address="127.0.0.1",
            ranks_per_node=2,
            master_addr="127.0.0.1",
            master_port=listener.getsockname()[1],
        )
        with (
            in_file(program_of(wait_or_die, (there,), {})) as program,
            zygote_client.open_spawner(None, math.inf, Interpreter.current()) as begin,
        ):
            spawner: Any = Remembering(begin)
            with Agent(
                node, program, Silence(), spawner, listener=listener, on_failure=hear
            ) as agent:
                outcomes = agent.run()
    assert heard == [1, 0]
    assert [each.origin.rank for each in outcomes if isinstance(each, Failure)] == [1, 0]
