"""How the driver's share of a cluster run grows with the number of (simulated) nodes."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.measure import Driven, apart
from benchmarks.nodes import NodeRecord, Orders
from benchmarks.peers import Peer, chosen
from benchmarks.report import Row, gathered, row
from benchmarks.turns import Effort, measured

NAMES = ("ours", "floor_sockets")
NODES = (10, 30, 100, 300, 1000, 2000)
FEW_NODES = (10, 100, 300)
LINES = 100
PROCESSES = 2
"""Number of processes for the simulated nodes; each has some thousand descriptors and one core."""
DEADLINE = 180.0
USUAL_DESCRIPTORS = 1024
"""Default soft limit of most systems."""
RUNS = 3
WARM_UP_NODES = 4
FIT_FROM = 100
"""Number of nodes from which the growth is fitted; below it, constant costs dominate."""


class Case(NamedTuple):
    """Number of nodes, lines that each prints, and the driver's limit of descriptors."""

    peer: Peer
    nodes: int
    lines: int = 0
    descriptors: int = 0

    @property
    def title(self) -> str:
        if self.lines:
            return printing_title(self.nodes, self.lines)
        if self.descriptors:
            return limited_title(self.nodes, self.descriptors)
        return titled(self.nodes)


def titled(nodes: int) -> str:
    """Return the title of a plain case."""
    return f"{nodes:,} nodes"


def printing_title(nodes: int, lines: int) -> str:
    """Return the title of a case in which the nodes print."""
    return f"{titled(nodes)}, each prints {lines} lines"


def limited_title(nodes: int, descriptors: int) -> str:
    """Return the title of a case in which the driver's descriptors are limited."""
    return f"{titled(nodes)}, at most {descriptors:,} descriptors"


def growth_title(first: int, last: int) -> str:
    """Return the title of the growth between two numbers of nodes."""
    return f"growth from {first:,} to {titled(last)}"


def measure(effort: Effort) -> list[Row]:
    """Measure the driver's part, and fit how it grows."""
    peers = chosen(NAMES, effort.families)
    sizes = FEW_NODES if effort.quick else NODES
    cases = [Case(peer, nodes) for nodes in sizes for peer in peers]
    ours = [peer for peer in peers if peer.name == "ours"]
    cases += [Case(peer, nodes, lines=LINES) for nodes in sizes[-2:] for peer in ours]
    rows = measured(cases, effort.rounds, _drive, _rows)
    grown = [growth for peer in peers for growth in _growths(peer, rows)]
    if effort.quick:
        return [*rows, *grown]
    limited = [Case(peer, 1000, descriptors=USUAL_DESCRIPTORS) for peer in ours]
    limited += [Case(peer, 2000, descriptors=USUAL_DESCRIPTORS) for peer in ours]
    return [*rows, *grown, *measured(limited, 1, _drive, _rows_of_limit)]


def drive(peer: str, nodes: int, lines: int, descriptors: int) -> dict[str, Any]:
    """Act as the driver of one run of simulated nodes."""
    # Start the nodes' processes first: they need the descriptors that this one gives up.
    _allow_descriptors(None)
    with _processes() as processes:
        _allow_descriptors(descriptors or None)
        if descriptors:
            return _run(peer, _Crowd(processes, nodes, lines))
        _run(peer, _Crowd(processes, WARM_UP_NODES))
        runs = [_run(peer, _Crowd(processes, nodes, lines)) for _ in range(RUNS)]
    return {key: [run[key] for run in runs] for key in runs[0]}


def _run(peer: str, crowd: _Crowd) -> dict[str, float]:
    serve = _follow_run if peer == "ours" else _serve_sockets
    cpu = time.process_time()
    began = serve(crowd)
    cpu = time.process_time() - cpu
    return {
        "rendezvoused": max(fate.rendezvoused for fate in crowd.fates) - began,
        "released": max(fate.released for fate in crowd.fates) - began,
        "cpu": cpu,
        "through_spark": sum(fate.through_spark for fate in crowd.fates),
        "refused": sum(fate.refused for fate in crowd.fates),
    }


class _Crowd:
    """Processes of simulated nodes, which wait for instructions."""

    def __init__(
        self, processes: Sequence[subprocess.Popen[str]], nodes: int, lines: int = 0
    ) -> None:
        self._processes = processes
        self._lines = lines
        self.nodes = nodes
        self.fates: list[NodeRecord] = []

    def start(self, port: int, secret: str) -> float:
        """Let the nodes connect; return the start time."""
        began = time.monotonic()
        share = math.ceil(self.nodes / len(self._processes))
        for number, process in enumerate(self._processes):
            first = number * share
            count = max(0, min(share, self.nodes - first))
            assert process.stdin is not None
            orders = Orders(port, secret, first, count, self._lines)
            process.stdin.write(json.dumps(asdict(orders)) + "\n")
            process.stdin.flush()
        return began

    def await_end(self) -> None:
        """Return the results of all nodes."""
        for process in self._processes:
            assert process.stdout is not None
            self.fates += [NodeRecord(**fate) for fate in json.loads(process.stdout.readline())]


@contextmanager
def _processes() -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "benchmarks.nodes"]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _follow_run(crowd: _Crowd) -> float:
    """Follow the run as the driver does, with a hub and a controller; return the start time."""
    from distributor.control.controller import Controller
    from distributor.control.run import Attempt, Handle, Launcher, NodesEnded, Run
    from distributor.control.sink import DriverSink, Listeners
    from distributor.programs import program_of
    from distributor.run_spec import RunSpec, Settings
    from distributor.wire.hub import Hub

    secret = secrets.token_hex(16)
    spec = RunSpec(
        program=program_of(print, (), {}),
        num_processes=crowd.nodes,
        min_processes=1,
        settings=Settings(warm=False),
    )
    attempt = Attempt(run=Run(spec=spec, launcher=Launcher()), num_ranks=crowd.nodes)
    deadline = time.monotonic() + DEADLINE
    with (
        Hub("127.0.0.1", secret.encode()) as hub,
        DriverSink(attempt, Listeners((), Launcher().thread)) as sink,
    ):
        handle = Handle(links=hub, num_nodes=crowd.nodes)
        began = crowd.start(hub.port, secret)
        ending = threading.Thread(
            target=_end_nodes, args=(crowd, lambda error: hub.post(NodesEnded(error=error)))
        )
        ending.start()
        Controller(attempt, handle, sink, deadline).follow()
        ending.join()
    return began


def _end_nodes(crowd: _Crowd, ended: Callable[[Exception | None], object]) -> None:
    """Report the end of the nodes, with an error if a process of theirs has failed."""
    try:
        crowd.await_end()
    except Exception as error:
        ended(error)
        raise
    ended(None)


def _serve_sockets(crowd: _Crowd) -> float:
    """Accept all connections, send to all, receive from all, and send to all again."""
    return asyncio.run(_serve(crowd))


async def _serve(crowd: _Crowd) -> float:
    writers: list[asyncio.StreamWriter] = []
    done = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal done
        writers.append(writer)
        if len(writers) == crowd.nodes:
            _broadcast(writers)
        await reader.readexactly(1)
        done += 1
        if done == crowd.nodes:
            _broadcast(writers)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1024)
    began = crowd.start(server.sockets[0].getsockname()[1], secret="")
    await asyncio.to_thread(crowd.await_end)
    server.close()
    for writer in writers:
        writer.close()
    return began


def _broadcast(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.write(b"g")


def _allow_descriptors(limit: int | None) -> None:
    """Set the soft limit of descriptors of this process; by default to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if limit is None else limit, hard))


def _drive(case: Case) -> Driven:
    return apart(
        drive,
        DEADLINE,
        peer=case.peer.name,
        nodes=case.nodes,
        lines=case.lines,
        descriptors=case.descriptors,
    )


RENDEZVOUSED, RELEASED = "until all have rendezvoused", "until all are released"
BUSY = "the driver's CPU time"
MEASURED = (RENDEZVOUSED, RELEASED, BUSY)
UNLINKED, THROUGH_SPARK = "nodes without a link", "sent through Spark"


def _rows(case: Case, measurements: list[Driven]) -> list[Row]:
    astray = sum(gathered(measurements, "through_spark")) + sum(gathered(measurements, "refused"))
    note = f"{astray:.0f} nodes without a link" if astray else ""
    return [
        row(case.peer, case.title, RENDEZVOUSED, gathered(measurements, "rendezvoused"), note=note),
        row(case.peer, case.title, RELEASED, gathered(measurements, "released"), note=note),
        row(case.peer, case.title, BUSY, gathered(measurements, "cpu"), note=note),
    ]


def _rows_of_limit(case: Case, measurements: list[Driven]) -> list[Row]:
    return [
        row(
            case.peer,
            case.title,
            UNLINKED,
            gathered(measurements, "refused"),
            "nodes",
        ),
        row(
            case.peer,
            case.title,
            THROUGH_SPARK,
            gathered(measurements, "through_spark"),
            "nodes",
        ),
        row(case.peer, case.title, RENDEZVOUSED, gathered(measurements, "rendezvoused")),
    ]


def _growths(peer: Peer, rows: Sequence[Row]) -> list[Row]:
    grown = []
    for what in MEASURED:
        points = [
            (nodes, found.median)
            for nodes in NODES
            for found in rows
            if (found.peer, found.what) == (peer.name, what)
            and found.case == titled(nodes)
            and nodes >= FIT_FROM
            and found.median
        ]
        if len(points) > 1:
            title = growth_title(points[0][0], points[-1][0])
            note = "the power of the number of nodes: 1 is linear"
            grown.append(row(peer, title, what, [slope(points)], "", note))
    return grown


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Fit a power law by least squares: the slope in logarithms."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x0) ** 2 for x in xs)
