"""What the ranks of an examination do: a run that trains nothing."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from distributor.core.addresses import host_name, joined, resolve
from distributor.diagnosis.machine import Machine, examine
from distributor.diagnosis.report import Check
from distributor.diagnosis.storage import check_storage
from distributor.node.agent.network import source_address

CONNECT_SECONDS = 3.0
EXCHANGE_SECONDS = 30.0
"""Seconds for all ranks to do the same."""
MAX_THREADS = 64


class RankSpec(NamedTuple):
    """What each rank examines.

    Parameters
    ----------
    backend : str
        The backend of the collective, "gloo" or "nccl".
    driver : tuple of str and int, optional
        Where the hub listens; None in local mode.
    storage : str, optional
        Storage that has the driver's marker.
    marker : str
        The name of the marker.
    """

    backend: str
    driver: tuple[str, int] | None = None
    storage: str | None = None
    marker: str = ""


@dataclass(frozen=True)
class ExaminedRank:
    """What one rank has found."""

    machine: Machine
    to_driver: str
    """Why it cannot connect to the driver; empty if it can."""
    to_hosts: Mapping[str, str]
    """The hosts of other ranks to which it cannot connect, and why."""
    storage: Check | None
    collective: str
    """The error of the collective; empty if there is none."""


def examine_rank(spec: RankSpec) -> ExaminedRank:
    """Examine this rank's machine, and its connections to the driver and the other ranks."""
    host = host_name()
    to_hosts, is_connected = _connect_to_others(host)
    return ExaminedRank(
        machine=examine(host),
        to_driver=_why_unreachable(spec.driver) if spec.driver else "",
        to_hosts=to_hosts,
        storage=check_storage(spec.storage, spec.marker, host) if spec.storage else None,
        collective=_reduce(spec.backend) if is_connected else "",
    )


def _connect_to_others(host: str) -> tuple[dict[str, str], bool]:
    """Connect to a rank of each other host; return why some fail, and whether no rank's do."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=EXCHANGE_SECONDS)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        master, port, is_master=False, timeout=timeout
    )

    def exchange(name: str, own: Any) -> list[Any]:
        store.set(f"doctor/{name}/{rank}", json.dumps(own))
        return [json.loads(store.get(f"doctor/{name}/{each}")) for each in range(size)]

    own = source_address(master)
    with socket.create_server((own, 0), family=resolve(own)[0], backlog=size) as server:
        found = exchange("address", [host, own, server.getsockname()[1]])
        others = {name: (address, port) for name, address, port in found if name != host}
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            errors = zip(others, pool.map(_why_unreachable, others.values()), strict=True)
            to_hosts = {name: error for name, error in errors if error}
        # The server is open until all ranks have connected.
        return to_hosts, not any(exchange("errors", to_hosts))


def _why_unreachable(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError as error:
        return f"{joined(*address)}: {error}"
    return ""


def _reduce(backend: str) -> str:
    """Reduce a tensor over all ranks, and return the error; empty if there is none."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=EXCHANGE_SECONDS))
        device = f"cuda:{os.environ['LOCAL_RANK']}" if backend == "nccl" else "cpu"
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor)
        tensor.item()  # waits for the GPU
        dist.destroy_process_group()
    except Exception as error:  # of torch, gloo or NCCL
        return f"{type(error).__name__}: {error}"
    return ""
