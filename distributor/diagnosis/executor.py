"""The barrier task of an examination: one for each slot, of which one for each executor works."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from distributor.core.addresses import use_host_name
from distributor.core.resources import spark_local_dirs
from distributor.diagnosis.machine import Machine, examine
from distributor.diagnosis.probe import NetworkPath, Probe, ProbeServer
from distributor.diagnosis.report import Check
from distributor.diagnosis.services import check_storage, check_tracking
from distributor.node.agent.network import routable_address
from distributor.node.spark_task.rendezvous import hosts_of

if TYPE_CHECKING:
    import pyarrow as pa

TRANSFER_SIZE = 4 * 2**20
"""Bytes of the transfer that measures bandwidth."""
TRANSFERS_SECONDS = 6.0
"""Seconds for the transfers of one executor; with many executors not all pairs are measured."""
MAX_THREADS = 64
DRIVER = "the driver"


@dataclass(frozen=True)
class ExaminationSpec:
    """What the tasks of an examination do.

    Parameters
    ----------
    driver : tuple of str and int, or None
        Where the driver's probe server listens; None if it could not be opened.
    token : bytes
        The token of all probe servers.
    ports : range or None
        The ports for rank 0's store.
    ranks_per_task : int
        The number of ranks that a task of a run would start.
    storage : str or None
        The path of shared storage.
    marker : str
        The name of the driver's file there.
    tracking_uri : str
        The address of MLflow's server.
    """

    driver: tuple[str, int] | None
    token: bytes
    ports: range | None
    ranks_per_task: int
    storage: str | None
    marker: str
    tracking_uri: str


@dataclass(frozen=True)
class ExaminedExecutor:
    """What was found on one executor.

    Parameters
    ----------
    host : str
        Its host, as Spark names it.
    tasks : int
        The number of its tasks.
    machine : Machine
        What it has.
    checks : tuple of Check
        Checks that were made there.
    paths : tuple of NetworkPath
        The network paths to the driver and to all other executors.
    unreachable : str
        Why it could not listen; empty if it could.
    """

    host: str
    tasks: int
    machine: Machine
    checks: tuple[Check, ...]
    paths: tuple[NetworkPath, ...]
    unreachable: str


def run(
    pickled_spec: bytes, batches: Iterator[Any], replaced: str = ""
) -> Iterator[pa.RecordBatch]:
    """Examine the executor of one task.

    Parameters
    ----------
    pickled_spec : bytes
        The `ExaminationSpec`.
    batches : iterator
        The rows that Spark passes to the task.
    replaced : str
        The copy of this package that is installed here and differs from the driver's, if any.

    Yields
    ------
    RecordBatch
        The pickled `ExaminedExecutor`; nothing from other tasks of the same executor.
    """
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
    with _Server(host, hosts, spec) as server:
        peers = [json.loads(text) for text in context.allGather(json.dumps(server.address))]
        others = [*zip(hosts, peers, strict=True)]
        found = _examine(spec, host, len(tasks), _in_ring_order(others, tasks[0]), server)
        context.barrier()  # this server must stay open until all executors have probed it
    yield pa.RecordBatch.from_pydict({"executor": pa.array([pickle.dumps(found)], pa.binary())})


class _Server:
    """The probe server of an executor; it may have failed to open."""

    def __init__(self, host: str, hosts: list[str], spec: ExaminationSpec) -> None:
        self.address: tuple[str, int] | None = None
        self.error = ""
        self._server: ProbeServer | None = None
        try:
            address = routable_address(host, hosts)
            self._server = ProbeServer(address, spec.token, spec.ports)
            self.address = (address, self._server.port)
        except OSError as error:
            self.error = str(error)

    def __enter__(self) -> _Server:
        if self._server is not None:
            self._server.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.__exit__(*exc_info)


def _examine(
    spec: ExaminationSpec,
    host: str,
    tasks: int,
    others: Iterable[tuple[str, Any]],
    server: _Server,
) -> ExaminedExecutor:
    targets = [(name, tuple(address)) for name, address in others if address is not None]
    if spec.driver is not None:
        targets.insert(0, (DRIVER, spec.driver))
    checks = [check_tracking(spec.tracking_uri, host)]
    if spec.storage is not None:
        checks.append(check_storage(spec.storage, spec.marker, host))
    return ExaminedExecutor(
        host=host,
        tasks=tasks,
        machine=examine(host, _folders(), tasks * spec.ranks_per_task, in_executor=True),
        checks=tuple(checks),
        paths=_measure(host, targets, spec.token),
        unreachable=server.error,
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


def _folders() -> list[str]:
    """Return the folders of this executor that Spark writes to."""
    from pyspark import SparkFiles

    files = os.path.abspath(SparkFiles.getRootDirectory())
    return [files, os.getcwd(), *spark_local_dirs()]
