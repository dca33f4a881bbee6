"""The barrier task of an examination: one for each slot, of which one for each executor works."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from distributor.core.addresses import use_host_name
from distributor.core.resources import spark_local_dirs
from distributor.diagnosis.machine import Machine, examine
from distributor.diagnosis.network import DRIVER, NetworkPath, Probe, ProbeServer
from distributor.diagnosis.report import Check
from distributor.diagnosis.services import check_storage, check_tracking
from distributor.launchers.spark.task.detour import hosts_of
from distributor.node.agent.network import routable_address

if TYPE_CHECKING:
    import pyarrow as pa

TRANSFER_SIZE = 4 * 2**20
"""Bytes of the transfer that measures bandwidth."""
TRANSFERS_SECONDS = 6.0
"""Seconds for the transfers of one executor; with many executors not all pairs are measured."""
MAX_THREADS = 64


@dataclass(frozen=True)
class ExaminationSpec:
    """What the tasks of an examination do."""

    driver: tuple[str, int] | None
    token: bytes
    ports: range | None
    ranks_per_task: int
    storage: str | None
    marker: str
    tracking_uri: str


@dataclass(frozen=True)
class ExaminedExecutor:
    """What was found on one executor."""

    tasks: int
    machine: Machine
    checks: tuple[Check, ...]
    paths: tuple[NetworkPath, ...]
    unreachable: str


def run(
    pickled_spec: bytes, batches: Iterator[Any], replaced: str = ""
) -> Iterator[pa.RecordBatch]:
    """Examine the executor of one task."""
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    spec: ExaminationSpec = pickle.loads(pickled_spec)
    context = BarrierTaskContext.get()
    executors = [info.address for info in context.getTaskInfos()]
    own = executors[context.partitionId()]
    tasks = [task for task, executor in enumerate(executors) if executor == own]
    hosts = hosts_of(context)
    host = hosts[context.partitionId()]
    use_host_name(host)
    if context.partitionId() != tasks[0]:
        context.allGather("null")
        context.barrier()
        return
    server, address, error = None, None, ""
    try:
        server = ProbeServer(routable_address(host, hosts), spec.token, spec.ports)
        address = server.address
    except OSError as caught:
        error = str(caught)
    with server or nullcontext():
        peers = [json.loads(text) for text in context.allGather(json.dumps(address))]
        others = [*zip(hosts, peers, strict=True)]
        found = _examine(spec, host, len(tasks), _in_ring_order(others, tasks[0]), error)
        context.barrier()  # this server must stay open until all executors have probed it
    yield pa.RecordBatch.from_pydict({"executor": pa.array([pickle.dumps(found)], pa.binary())})


def _examine(
    spec: ExaminationSpec,
    host: str,
    tasks: int,
    others: Iterable[tuple[str, Any]],
    unreachable: str,
) -> ExaminedExecutor:
    from pyspark import SparkFiles

    targets = [(name, tuple(address)) for name, address in others if address is not None]
    if spec.driver is not None:
        targets.insert(0, (DRIVER, spec.driver))
    folders = [os.path.abspath(SparkFiles.getRootDirectory()), os.getcwd(), *spark_local_dirs()]
    checks = [check_tracking(spec.tracking_uri, host)]
    if spec.storage is not None:
        checks.append(check_storage(spec.storage, spec.marker, host))
    return ExaminedExecutor(
        tasks=tasks,
        machine=examine(host, folders, tasks * spec.ranks_per_task, in_executor=True),
        checks=tuple(checks),
        paths=_measure(host, targets, spec.token),
        unreachable=unreachable,
    )


def _measure(host: str, targets: list[tuple[str, Any]], token: bytes) -> tuple[NetworkPath, ...]:
    """Connect to all targets at once, then transfer to one after the other."""
    if not targets:
        return ()
    with ExitStack() as stack:
        with ThreadPoolExecutor(min(MAX_THREADS, len(targets))) as pool:
            probes = list(pool.map(lambda each: Probe(host, each[0], each[1], token), targets))
        for probe in probes:
            stack.enter_context(probe)
        deadline = monotonic() + TRANSFERS_SECONDS
        for probe in probes:
            if monotonic() < deadline:
                probe.transfer(TRANSFER_SIZE)
        return tuple(probe.path for probe in probes)


def _in_ring_order(others: list[tuple[str, Any]], task: int) -> list[tuple[str, Any]]:
    """Begin with the next executor, so that not all executors transfer to the same one at once."""
    return [*others[task + 1 :], *others[:task]]
