"""The processes of one Ray node, which ``ray start`` starts and watches."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from distributor._compat.ray import ADDRESS_FILE, LONGEST_SOCKET, VARIABLES, ray_command
from distributor.core.addresses import host_name
from distributor.core.versions import release
from distributor.errors import DistributorError, StartTimeout
from distributor.node.agent.worker_env import mask_entries
from distributor.node.process.scratch import create_elsewhere
from distributor.rank.context import worker_context

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
