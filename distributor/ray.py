"""``@ray_launch``: runs a function as the driver of a Ray cluster that lasts as long as the run.

The decorator comes first, then what ranks run: the first one of each node starts a Ray node.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

from distributor import runtime
from distributor._compat.ray import ADDRESS_FILE, LONGEST_SOCKET, VARIABLES, ray_command
from distributor.control.future import RunFuture
from distributor.core.addresses import host_name
from distributor.core.cell_errors import ends_at_caller
from distributor.core.files import create_elsewhere
from distributor.core.gpus import AcceleratorType, GPUType
from distributor.core.rank_variables import THREADS_VARIABLE
from distributor.core.text import listed
from distributor.core.versions import install_command, release
from distributor.data.dataframes import DatasetFinder
from distributor.errors import DistributorError, ExecutorNotReady, StartTimeout
from distributor.node.agent.worker_env import RANK_VARIABLES, mask_entries
from distributor.programs import check_arguments, check_runs
from distributor.rank.context import connect_store, worker_context
from distributor.rank.store_channel import StoreChannel
from distributor.run_spec import Settings
from distributor.screen.messages import warn_once
from distributor.serialization.pickle_diagnostics import name_of
from distributor.serverless import DecoratedFunction, Given, ServerlessLauncher, decorated
from distributor.settings import check_num_processes, documented
from distributor.spark.session import Session
from distributor.torch_distributor import TorchDistributor

__all__ = ["RayFunction", "ray_launch", "require_ray"]

P = ParamSpec("P")
R = TypeVar("R")

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
ADDRESS_VARIABLE = "RAY_ADDRESS"
END_POLL_SECONDS = 0.2
"""Seconds between two looks of a node at whether the function has ended."""


def _why_no_ray() -> str | None:
    """Return why this process's Ray cannot be used; None if it can."""
    if find_spec("ray") is None:
        return "Ray is not installed"
    from importlib import metadata  # slow to import

    found = metadata.version("ray")
    if release(found) < MIN_VERSION:
        return f"Ray {found} is installed, which is older than {'.'.join(map(str, MIN_VERSION))}"
    return None


def require_ray() -> None:
    """Check that Ray is installed.

    Raises
    ------
    ImportError
        If it is not, or is too old.
    """
    if why := _why_no_ray():
        raise ImportError(
            f"{why} in this Python. Install the same version here and on all nodes: "
            f"{install_command('ray')}.",
            name="ray",
        )


class RayFunction(DecoratedFunction[P, R]):
    """A function that can run on a Ray cluster of its own, as ``@ray_launch`` returns it.

    A plain call runs the function once, in this process, and starts no Ray cluster.

    Parameters
    ----------
    function : callable
        The decorated function, or a ``classmethod`` or ``staticmethod`` of one.
    launcher : callable
        Returns the `TorchDistributor` for a run.
    run_async : bool
        Whether `distributed` returns a future.
    """

    @ends_at_caller
    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Start a Ray cluster, run the function once on its head node, and end the cluster.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function.

        Returns
        -------
        object or RunFuture
            The function's value; with ``run_async=True`` a future of it, as `distributed_async`
            returns.

        Raises
        ------
        ImportError
            If Ray is not installed, or is too old.
        TypeError, ValueError
            If an argument of ``@ray_launch`` is invalid, or the function does not take these
            arguments.
        StartTimeout
            If not all Ray nodes have started within ``start_timeout``.
        Exception
            The function's own exception, or an error of this package, as `TorchDistributor.run`
            raises them.

        Examples
        --------
        >>> count_gpus.distributed()  # doctest: +SKIP
        """
        if self._run_async:
            return self.distributed_async(*args, **kwargs)
        distributor, program = self._prepare(args, kwargs)
        return distributor.run(program, *args, **kwargs)

    @ends_at_caller
    def distributed_async(self, *args: P.args, **kwargs: P.kwargs) -> RunFuture[R]:
        """Start what `distributed` does in the background. Several runs may be active at once.

        Each run has a Ray cluster of its own. A script that reaches its end waits for its active
        runs.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function.

        Returns
        -------
        RunFuture
            A `concurrent.futures.Future` of what `distributed` returns or raises. Its ``cancel()``
            ends the run and its cluster.

        Raises
        ------
        ImportError
            If Ray is not installed, or is too old.
        TypeError, ValueError, OSError, RuntimeError
            If an argument is invalid, as `TorchDistributor.submit` raises it, or the function does
            not take these arguments.

        Examples
        --------
        >>> future = count_gpus.distributed_async()  # doctest: +SKIP
        >>> future.result()  # doctest: +SKIP
        """
        distributor, program = self._prepare(args, kwargs)
        return distributor.submit(program, *args, **kwargs)

    def _prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[TorchDistributor, RayProgram]:
        require_ray()
        check_runs(self._function)
        check_arguments(self._function, args, kwargs)
        _check_no_datasets(self._function, args, kwargs)
        distributor = self._launcher()
        session = None if distributor.local_mode else Session.active()
        cores = session.conf("spark.executor.cores") if session else None
        timeout = distributor.start_timeout
        return distributor, RayProgram(self._function, timeout, int(cores) if cores else None)


@overload
def ray_launch(num_accelerators: Callable[P, R]) -> RayFunction[P, R]: ...


@overload
def ray_launch(
    num_accelerators: int | None = None,
    accelerator_type: AcceleratorType | GPUType | str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    *,
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    use_gpu: bool = True,
    run_async: bool = False,
    **settings: Any,
) -> Callable[[Callable[P, R]], RayFunction[P, R]]: ...


@documented(Settings, skip=["gpu_type", "timeout"])
def ray_launch(
    num_accelerators: Any = None,
    accelerator_type: AcceleratorType | GPUType | str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    *,
    gpus: int | None = None,
    gpu_type: GPUType | str | None = None,
    use_gpu: bool = True,
    run_async: bool = False,
    **settings: Any,
) -> Any:
    """Decorate a function so that it can run on a Ray cluster of its own.

    ``.distributed()`` starts a Ray node in each Spark task (or one on this machine), with the CPUs
    and GPUs of that node, and waits until all of them have joined. The function then runs once, on
    the head node, with Ray initialized. All processes and files of the cluster are gone when the
    run has ended, however it ends. The cluster accepts only clients with the token of its run.

    The decorator follows ``databricks.air.ray_launch`` and ``serverless_gpu.ray.ray_launch``:
    https://docs.databricks.com/aws/en/machine-learning/ai-runtime/connecting/distributed-training.

    Parameters
    ----------
    num_accelerators : int, optional
        Number of GPUs of the cluster; with ``use_gpu=False`` and ``remote=True`` the number of Ray
        nodes. By default it is the number of GPUs of a node of `accelerator_type` or, if that does
        not say it, of this machine.
    accelerator_type : AcceleratorType, GPUType or str, optional
        Required type of the GPUs, such as "GPU_8xH100" or "A10", in upper or lower case.
    remote : bool, default False
        Whether Ray nodes run on the executors of the active Spark session instead of this machine.
    timeout : float, optional
        Seconds after which the run is ended; by default there is no limit.
    gpus : int, optional
        The older name of `num_accelerators`.
    gpu_type : GPUType or str, optional
        The older name of `accelerator_type`.
    use_gpu : bool, default True
        Whether Ray nodes have GPUs.
    run_async : bool, default False
        Whether ``.distributed()`` returns a future at once, as ``.distributed_async()`` does.
    **settings
        Settings of `TorchDistributor`, listed below, as for ``@distributed``. ``start_timeout``
        also bounds the start of the Ray cluster. The cluster's files are in the folder that the
        variable RAY_TEMP_DIR names, if it is set here or in ``env``.

    Other Parameters
    ----------------
    {settings}

    Returns
    -------
    callable
        The decorator, which returns a `RayFunction`. Values are checked at each run.

    Raises
    ------
    TypeError
        If an argument is unknown, or both names of one argument are given.

    Examples
    --------
    >>> @ray_launch(use_gpu=False)  # doctest: +SKIP
    ... def sum_of_squares(count):
    ...     import ray
    ...     square = ray.remote(lambda x: x**2)
    ...     return sum(ray.get([square.remote(x) for x in range(count)]))
    >>> sum_of_squares.distributed(10)  # doctest: +SKIP
    285
    """
    return decorated("@ray_launch", RayFunction, RayLauncher, locals())


class RayLauncher(ServerlessLauncher):
    """Creates the distributor of each run of ``@ray_launch``."""

    def __call__(self) -> TorchDistributor:
        (name, value), settings = self.count, _with_variables(self.settings)
        if not self.remote and not self.use_gpu:  # this machine is one Ray node
            if value is not None and check_num_processes(name, value) != (1, 1):
                warn_once(f"{name} has no effect: without GPUs, this machine is one Ray node.")
            value = 1
        launcher = replace(self, count=Given(name, value), settings=settings)
        return ServerlessLauncher.__call__(launcher)


def _check_no_datasets(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that there is no Spark DataFrame among the arguments, of which a node has a share."""
    finder = DatasetFinder()
    finder.replace_in(args, kwargs, function)
    if finder.datasets:
        raise TypeError(
            f"{finder.datasets[0].name} is a Spark DataFrame, but the function of @ray_launch runs "
            "once, on the head node. Write the rows with df.write.parquet(path), and read them in "
            "the function with ray.data.read_parquet(path)."
        )


def _with_variables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the environment variables of a new Ray cluster to a run's settings."""
    env = settings.get("env", {})
    if not isinstance(env, Mapping):
        return dict(settings)  # the distributor raises the error
    temp_dir = os.environ.get(TEMP_DIR_VARIABLE)
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **({TEMP_DIR_VARIABLE: temp_dir} if temp_dir else {}),
    }
    return {**settings, "env": {**variables, **env}}


class RayNode:
    """A Ray node of this machine, on ports that the system chooses.

    All of its processes belong to this process's group, and its files are in a folder that is
    removed when this process has ended, however it ends.
    """

    def __init__(
        self, name: str, cpus: int | None, deadline: float, address: str | None = None
    ) -> None:
        """Start a node of the cluster at an address, or its head."""
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
                env={
                    "RAY_USAGE_STATS_ENABLED": "0",
                    **VARIABLES,
                    **os.environ,
                    # The node's processes find the modules that this one finds.
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
        self.address = self._await_start(deadline)

    def _await_start(self, deadline: float) -> str:
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
        channel = StoreChannel(node_rank, num_nodes, connect_store("distributor/ray"))
        if node_rank:
            return self._serve(channel, deadline)
        others = (
            _await(channel, f"host/{rank}", f"node {rank} has not begun", deadline)
            for rank in range(1, num_nodes)
        )
        self._start_head([host_name(), *others], deadline, channel)
        try:
            return self.func(*args, **kwargs)
        finally:
            channel.set("end", True)

    def _start_head(
        self, hosts: Sequence[str], deadline: float, channel: StoreChannel | None = None
    ) -> None:
        """Start the cluster, and make this process its driver."""
        node = self._start_node(0, hosts, deadline)  # holds a port until the cluster has started
        address = node.address
        if channel is not None:
            channel.set("cluster", {"address": address, "hosts": hosts})
        os.environ[ADDRESS_VARIABLE] = address
        import ray

        # Tasks have the address too: another cluster of this machine may be found without it.
        ray.init(address=address, runtime_env={"env_vars": {ADDRESS_VARIABLE: address}})
        _await_nodes({_name(rank, hosts) for rank in range(len(hosts))}, deadline)

    def _serve(self, channel: StoreChannel, deadline: float) -> None:
        """Add a node to the cluster, for as long as the function runs."""
        channel.set_own("host", host_name())
        cluster = _await(channel, "cluster", "the head node has not started", deadline)
        node = self._start_node(channel.rank, cluster["hosts"], deadline, cluster["address"])
        while not channel.has("end"):
            node.check_running()
            time.sleep(END_POLL_SECONDS)
        node.stop()

    def _start_node(
        self, node_rank: int, hosts: Sequence[str], deadline: float, address: str | None = None
    ) -> RayNode:
        cpus = self._cpus(node_rank, hosts)
        _leave_ranks()
        return RayNode(_name(node_rank, hosts), cpus, deadline, address)

    def _cpus(self, node_rank: int, hosts: Sequence[str]) -> int | None:
        """Return the number of a node's CPUs; None for all of its host's, which Ray counts."""
        nodes_here = hosts.count(hosts[node_rank])
        if nodes_here == 1 and self.executor_cores is None:
            return None
        share = (os.cpu_count() or 1) // nodes_here
        return max(1, min(share, self.executor_cores or share))


def _await(channel: StoreChannel, key: str, what: str, deadline: float) -> Any:
    """Return a value of another node, once it is there."""
    if channel.missing({0: key}, deadline):
        raise StartTimeout(f"Not all Ray nodes started within start_timeout: {what}.")
    return channel.get(key)


def _check_ray() -> None:
    if why := _why_no_ray():
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
