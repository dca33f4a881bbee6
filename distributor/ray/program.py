"""What the ranks of a ``@ray_launch`` run do: each node's first rank starts a Ray node."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distributor import runtime
from distributor._compat.ray import ADDRESS_FILE, LONGEST_SOCKET, VARIABLES, ray_command
from distributor.core.addresses import host_name
from distributor.core.text import listed
from distributor.core.versions import release
from distributor.errors import DistributorError, ExecutorNotReady, StartTimeout
from distributor.node.agent.worker_env import RANK_VARIABLES, mask_entries
from distributor.node.process.scratch import create_elsewhere
from distributor.rank.context import connect_store, sealed, unsealed, worker_context
from distributor.serialization.pickle_diagnostics import name_of

MIN_VERSION = (2, 55)
"""The first version of Ray whose nodes have temporary folders of their own."""
TEMP_DIR_VARIABLE = "RAY_TEMP_DIR"
MAX_SOCKET_BYTES = 107
"""Bytes of the path of a Unix socket."""
POLL_SECONDS = 0.1
STOP_SECONDS = 5.0
"""Seconds in which a node can leave the cluster before it is killed."""
_LOG_BYTES = 4000
"""Bytes at the end of a node's log that an error shows."""


def why_no_ray() -> str | None:
    """Return why this process's Ray cannot be used; None if it can."""
    if find_spec("ray") is None:
        return "Ray is not installed"
    from importlib import metadata  # slow to import

    found = metadata.version("ray")
    if release(found) < MIN_VERSION:
        return f"Ray {found} is installed, which is older than {'.'.join(map(str, MIN_VERSION))}"
    return None


class RayNode:
    """A Ray node of this machine, on ports that the system chooses.

    All of its processes belong to this process's group, and its files are in a folder that is
    removed when this process has ended, however it ends.
    """

    def __init__(self, name: str, cpus: int | None, address: str | None = None) -> None:
        self._name = name
        self._temp_dir = _create_temp_dir()
        self._log = self._temp_dir.with_suffix(".log")
        # Held while the node lives: Ray binds the port too, and no other process gets it.
        self._client_port = socket.socket()
        role = [f"--address={address}"] if address else self._head_arguments()
        command = ray_command(
            "start",
            "--block",
            f"--node-name={name}",
            f"--temp-dir={self._temp_dir}",
            f"--num-gpus={len(mask_entries(os.environ.get('CUDA_VISIBLE_DEVICES', '')))}",
            *([] if cpus is None else [f"--num-cpus={cpus}"]),
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            *role,
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )

    def await_start(self, deadline: float) -> str:
        """Wait until the node has started, and return the cluster's address."""
        file = self._temp_dir / ADDRESS_FILE
        while not (file.exists() and re.fullmatch(r".+:\d+", file.read_text())):
            self.check_running()
            if time.monotonic() > deadline:
                raise StartTimeout(
                    f"The Ray node {self._name} did not start within start_timeout.{self._output()}"
                )
            time.sleep(POLL_SECONDS)
        return file.read_text()

    def check_running(self) -> None:
        """Check that the node has not ended."""
        if (code := self._process.poll()) is not None:
            raise DistributorError(
                f"The Ray node {self._name} on {host_name()} has ended (exit code {code})."
                f"{self._output()}"
            )

    def stop(self) -> None:
        """Have the node leave the cluster."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _head_arguments(self) -> list[str]:
        host, _ = worker_context().rendezvous
        arguments = ["--head", "--port=0", "--include-dashboard=false", f"--node-ip-address={host}"]
        if find_spec("grpc") is not None:  # the head then also serves Ray clients, at a fixed port
            self._client_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._client_port.bind(("", 0))
            arguments.append(f"--ray-client-server-port={self._client_port.getsockname()[1]}")
        return arguments

    def _output(self) -> str:
        """Return the end of what ``ray start`` has printed, for an error."""
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").strip()
            return f" Its last output:\n{text}" if text else ""
        return ""


def _create_temp_dir() -> Path:
    """Return the path of the node's folder, which Ray creates."""
    scratch = worker_context().scratch
    wanted = os.environ.get(TEMP_DIR_VARIABLE)
    if wanted:
        folder = create_elsewhere(scratch, os.path.abspath(os.path.expanduser(wanted)))
    elif _fits(scratch):
        folder = scratch
    else:
        folder = create_elsewhere(scratch, "/tmp")
    if not _fits(folder):
        raise DistributorError(
            f"{TEMP_DIR_VARIABLE} is {wanted!r}, which is too long on {host_name()}: Ray's sockets "
            f"in it would have paths of more than {MAX_SOCKET_BYTES} bytes. Use a shorter one."
        )
    return Path(folder, "ray")


def _fits(folder: str) -> bool:
    return len(os.fsencode(os.path.join(folder, "ray", LONGEST_SOCKET))) <= MAX_SOCKET_BYTES


def _environment() -> dict[str, str]:
    """Return the variables of the node's processes, which find the modules that this one finds."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        **VARIABLES,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


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
