"""The task of an examination: one for each slot, of which one for each executor works."""

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

from distributor.core.addresses import joined, use_host_name
from distributor.core.resources import spark_local_dirs
from distributor.diagnosis.machine import Machine, examine
from distributor.diagnosis.network import DRIVER, NetworkPath, Probe, ProbeServer
from distributor.diagnosis.peers import BarrierPeers, DriverPeers, Peers
from distributor.diagnosis.report import Check
from distributor.diagnosis.services import check_storage, check_tracking
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

    barrier: bool
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

    executor: str
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

    spec: ExaminationSpec = pickle.loads(pickled_spec)
    peers = _peers(spec)
    found = None if peers is None else _examine_among(peers, spec)
    if found is not None:
        yield pa.RecordBatch.from_pydict({"executor": pa.array([pickle.dumps(found)], pa.binary())})


def _peers(spec: ExaminationSpec) -> Peers | None:
    """Find the other tasks; None if they have begun without this one."""
    if spec.barrier:
        return BarrierPeers()
    assert spec.driver is not None, "without it there is no ordinary job"
    try:
        return DriverPeers.of_this_task(spec.driver, spec.token)
    except LookupError:
        return None


def _examine_among(peers: Peers, spec: ExaminationSpec) -> ExaminedExecutor | None:
    """Examine the executor of this task; None if another task does so."""
    placement = peers.placement
    hosts, host = placement.hosts, placement.host
    use_host_name(host)
    if placement.own != placement.executors.index(placement.executors[placement.own]):
        peers.gather("null")
        peers.gather("")
        return None
    server, address, error = None, None, ""
    try:
        server = ProbeServer(routable_address(host, hosts), spec.token, spec.ports)
        address = server.address
    except OSError as caught:
        error = str(caught)
    with server or nullcontext():
        addresses = [json.loads(text or "null") for text in peers.gather(json.dumps(address))]
        others = [*zip(hosts, addresses, strict=True)]
        found = _examine(spec, peers, _in_ring_order(others, placement.own), error)
        peers.gather("")  # this server must stay open until all executors have probed it
    return found


def _examine(
    spec: ExaminationSpec, peers: Peers, others: Iterable[tuple[str, Any]], unreachable: str
) -> ExaminedExecutor:
    from pyspark import SparkFiles

    placement = peers.placement
    host, tasks = placement.host, placement.tasks_of_executor
    targets = [(name, tuple(address)) for name, address in others if address is not None]
    failed: tuple[NetworkPath, ...] = ()
    if spec.driver is not None and peers.error:
        failed = (NetworkPath(host, DRIVER, joined(*spec.driver), peers.error),)
    elif spec.driver is not None:
        targets.insert(0, (DRIVER, spec.driver))
    folders = [os.path.abspath(SparkFiles.getRootDirectory()), os.getcwd(), *spark_local_dirs()]
    checks = [check_tracking(spec.tracking_uri, host)]
    if spec.storage is not None:
        checks.append(check_storage(spec.storage, spec.marker, host))
    return ExaminedExecutor(
        executor=placement.executors[placement.own],
        tasks=tasks,
        machine=examine(host, folders, tasks * spec.ranks_per_task, in_executor=True),
        checks=tuple(checks),
        paths=failed + _measure(host, targets, spec.token),
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
