"""What the ranks of a ``@ray_launch`` run do: each node's first rank starts a Ray node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from distributor import runtime
from distributor.core.addresses import host_name
from distributor.core.text import listed
from distributor.errors import ExecutorNotReady, StartTimeout
from distributor.node.agent.worker_env import RANK_VARIABLES
from distributor.rank.context import connect_store, sealed, unsealed
from distributor.ray.node import POLL_SECONDS, RayNode, why_no_ray
from distributor.serialization.pickle_diagnostics import name_of

ADDRESS_VARIABLE = "RAY_ADDRESS"
THREADS_VARIABLE = "OMP_NUM_THREADS"
END_POLL_SECONDS = 0.2
"""Seconds between two looks of a node at whether the function has ended."""


class Peers:
    """JSON values that the nodes share by name, through the run's rendezvous store."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._store = connect_store("distributor/ray")

    def set(self, name: str, value: object) -> None:
        """Share a value with all nodes."""
        self._store.set(name, sealed(name, json.dumps(value).encode()))

    def has(self, name: str) -> bool:
        """Return whether a value is there."""
        return bool(self._store.check([name]))

    def get(self, name: str, what: str) -> Any:
        """Return a value, once it is there."""
        import torch.distributed as dist

        seconds = max(0.001, self._deadline - time.monotonic())
        try:
            self._store.wait([name], timedelta(seconds=seconds))
        except dist.DistStoreError:
            raise StartTimeout(f"Not all Ray nodes started within start_timeout: {what}.") from None
        return json.loads(unsealed(name, bytes(self._store.get(name))))


@dataclass(frozen=True)
class RayProgram:
    """Starts the Ray cluster, and calls the user's function on its head node."""

    func: Callable[..., Any]
    start_timeout: float
    executor_cores: int | None

    @property
    def __name__(self) -> str:
        return name_of(self.func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Be the head, another node, or a rank that its node's first rank has no work for."""
        if runtime.get_local_rank():
            return None
        node_rank, num_nodes = runtime.get_node_rank(), int(os.environ["GROUP_WORLD_SIZE"])
        _check_ray()
        deadline = time.monotonic() + self.start_timeout
        if num_nodes == 1:
            self._start_head([host_name()], deadline)
            return self.func(*args, **kwargs)
        peers = Peers(deadline)
        if node_rank:
            return self._serve(node_rank, peers, deadline)
        others = (
            peers.get(f"host{rank}", f"node {rank} has not begun") for rank in range(1, num_nodes)
        )
        hosts = [host_name(), *others]
        self._start_head(hosts, deadline, peers)
        try:
            return self.func(*args, **kwargs)
        finally:
            peers.set("end", True)

    def _start_head(
        self, hosts: Sequence[str], deadline: float, peers: Peers | None = None
    ) -> None:
        """Start the cluster, and make this process its driver."""
        cpus = self._cpus(0, hosts)
        _leave_ranks()
        node = RayNode(_name(0, hosts), cpus)
        address = node.await_start(deadline)
        if peers is not None:
            peers.set("cluster", {"address": address, "hosts": hosts})
        os.environ[ADDRESS_VARIABLE] = address
        import ray

        # Tasks have the address too: another cluster of this machine may be found without it.
        ray.init(address=address, runtime_env={"env_vars": {ADDRESS_VARIABLE: address}})
        _await_nodes({_name(rank, hosts) for rank in range(len(hosts))}, deadline)

    def _serve(self, node_rank: int, peers: Peers, deadline: float) -> None:
        """Add a node to the cluster, for as long as the function runs."""
        peers.set(f"host{node_rank}", host_name())
        cluster = peers.get("cluster", "the head node has not started")
        hosts = cluster["hosts"]
        cpus = self._cpus(node_rank, hosts)
        _leave_ranks()
        node = RayNode(_name(node_rank, hosts), cpus, cluster["address"])
        node.await_start(deadline)
        while not peers.has("end"):
            node.check_running()
            time.sleep(END_POLL_SECONDS)
        node.stop()

    def _cpus(self, node_rank: int, hosts: Sequence[str]) -> int | None:
        """Return the number of a node's CPUs; None for all of its host's, which Ray counts."""
        nodes_here = hosts.count(hosts[node_rank])
        if nodes_here == 1 and self.executor_cores is None:
            return None
        share = (os.cpu_count() or 1) // nodes_here
        return max(1, min(share, self.executor_cores or share))


def _check_ray() -> None:
    if why := why_no_ray():
        raise ExecutorNotReady(
            f"On {host_name()}: {why}. Install the driver's version there, or pass "
            "environment=['ray==<version>'] to @ray_launch."
        )


def _leave_ranks() -> None:
    """Remove what identifies a rank from the environment: Ray's processes and driver are none.

    Frameworks that find these variables would wait for the other ranks.
    """
    if runtime.get_local_world_size() > 1 and os.environ.get(THREADS_VARIABLE) == "1":
        del os.environ[THREADS_VARIABLE]  # Ray sets it by the CPUs of a task
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.pop(ADDRESS_VARIABLE, None)


def _name(node_rank: int, hosts: Sequence[str]) -> str:
    return f"node{node_rank}-{hosts[node_rank]}"


def _await_nodes(names: set[str], deadline: float) -> None:
    import ray

    list_nodes: Any = ray.nodes  # it has no types
    while missing := names - {node["NodeName"] for node in list_nodes() if node["Alive"]}:
        if time.monotonic() > deadline:
            raise StartTimeout(
                f"{listed('Ray node', sorted(missing))} of {len(names)} did not join the cluster "
                "within start_timeout. Their hosts must reach each other at all ports."
            )
        time.sleep(POLL_SECONDS)
