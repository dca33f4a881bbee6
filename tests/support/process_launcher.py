"""A third launcher: nodes as processes of this machine, with TCP links and without Spark.

What several nodes do is tested with it in seconds. `distribute` runs a function on it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distributor import NodeLost, TorchDistributor
from distributor.control.attempts import execute
from distributor.control.run import Attempt, Handle, Launcher, NodeEnded, Run, share_of
from distributor.core.versions import pickling_software
from distributor.node.node import Node, NodeStopped, Provisions
from distributor.node.process.specs import NodeShare
from distributor.node.process.supervisor import Interpreter
from distributor.programs import program_of
from distributor.run_spec import RunSpec
from distributor.serialization.program import Program, in_file
from distributor.wire import messages
from distributor.wire.hub import Hub
from distributor.wire.protocol import rank_secret
from distributor.wire.tcp_link import TcpLink

LOOPBACK = "127.0.0.1"
TESTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ProcessLauncher(Launcher):
    """Runs each node in a process of its own; `processes` has those of the latest attempt."""

    ranks_per_node: int = 1
    replaces: bool = True
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        return run.spec.num_processes

    @contextlib.contextmanager
    def start(self, attempt: Attempt, deadline: float) -> Iterator[Handle]:
        num_nodes, secret = attempt.num_ranks // self.ranks_per_node, secrets.token_bytes(32)
        share = share_of(attempt, num_nodes, rank_secret(secret))
        with Hub(LOOPBACK, secret) as hub:
            threads = []

            def start(numbers: Collection[int], **options: Any) -> Collection[int]:
                for number in numbers:
                    own = replace(share, node_rank=number, host=f"host{number}", address=LOOPBACK)
                    order = Order(
                        replace(own, **options), attempt.spec.program, (LOOPBACK, hub.port), secret
                    )
                    process = self.processes[number] = _start(order)
                    threads.append(threading.Thread(target=_await_end, args=(number, process, hub)))
                    threads[-1].start()
                return numbers

            start(range(num_nodes))
            try:
                yield Handle(
                    links=hub,
                    num_nodes=num_nodes,
                    cancel=self._kill,
                    replace=partial(start, joins=True) if self.replaces else lambda nodes: (),
                )
            finally:
                for thread in threads:
                    while thread.is_alive():  # some nodes may not be connected yet
                        hub.broadcast(messages.Stop("the run has ended"))
                        thread.join(0.2)

    def describe(self) -> dict[str, object]:
        return {"mode": "processes"}

    def _kill(self) -> None:
        for process in self.processes.values():
            process.kill()


@dataclass(frozen=True)
class Order:
    # What the process of a node reads from its standard input.
    share: NodeShare
    program: Program
    hub: tuple[str, int]
    secret: bytes


def _start(order: Order) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    assert process.stdin
    with process.stdin:
        pickle.dump(order, process.stdin, protocol=5)
    return process


def _await_end(number: int, process: subprocess.Popen[bytes], hub: Hub) -> None:
    """Report the end of a node, with the error that it has written to its standard output."""
    assert process.stdout
    with process.stdout:
        output = process.stdout.read()
    error = pickle.loads(output) if output else None
    if process.wait():
        error = NodeLost(f"The process of node {number} ended with {process.returncode}.")
    hub.post(NodeEnded(number, error))


def serve(order: Order) -> None:
    """Run a node in this process."""
    with Node(order.share) as node, in_file(order.program) as program:
        number = order.share.node_rank
        callbacks = node.receive, node.lose_link, node.lose_driver
        node.open(TcpLink(order.hub, order.secret, number, *callbacks))
        provisions = Provisions(Interpreter.current(), pickling_software(), program)
        node.run(contextlib.nullcontext(provisions), os.getpid())


def distribute(
    launcher: ProcessLauncher, ranks: int, function: Callable[..., Any], **settings: Any
) -> list[Any]:
    """Run a function on nodes that are processes, and return the values of all ranks."""
    given = TorchDistributor(ranks, use_gpu=False, **{"warm": False, **settings})
    program = program_of(function, (), {})
    spec = RunSpec(
        program=program, num_processes=ranks, min_processes=ranks, settings=given, keep_all=True
    )
    values: list[Any] = execute(Run(spec=spec, launcher=launcher, listeners=tuple(given.listeners)))
    return values


if __name__ == "__main__":
    try:
        serve(pickle.load(sys.stdin.buffer))
    except NodeStopped:
        pass
    except Exception as error:
        pickle.dump(error, sys.stdout.buffer)
