"""A standalone Spark cluster on machines, its drivers, and its processes by role."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from support.machines import LISTENING, Machine
from support.waiting import DEADLINE, MARK, marked, until

REGISTERED = "Successfully registered with master"
"""In a worker's log. A master that is not ready yet refuses it, and the worker tries again."""

Role = Callable[[psutil.Process], bool]


def _named(*parts: str) -> Role:
    return lambda process: all(part in " ".join(process.cmdline()) for part in parts)


def _is_agent(process: psutil.Process) -> bool:
    """Return True for a Python worker below Spark's daemon.

    It has the daemon's command line or, during a run, a title of the run.
    """
    parent = process.parent()
    is_daemon, in_a_run = _named("pyspark.daemon"), _named("distributor: node ")
    is_worker = is_daemon(process) or in_a_run(process)
    return parent is not None and is_worker and is_daemon(parent)


ROLES: dict[str, Role] = {
    "agent": _is_agent,
    "driver_jvm": _named("org.apache.spark.deploy.SparkSubmit"),
    "executor": _named("CoarseGrainedExecutorBackend"),
    "worker": _named("org.apache.spark.deploy.worker.Worker"),
    "zygote": _named(" zygote "),
}
"""The processes that their command lines identify."""


def listens(pid: int, port: int) -> bool:
    """Return True if a process, which may be in another network namespace, listens on a port.

    Spark's JVMs do not count: theirs may have the same number on another machine.
    """
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):  # it has ended
        if (process / "comm").read_text().strip() == "java":
            return False
        sockets = {_target(descriptor) for descriptor in (process / "fd").iterdir()}
        tables = [(process / "net" / name).read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()]
        return any(
            row[3] == LISTENING
            and row[1].endswith(f":{port:04X}")
            and f"socket:[{row[9]}]" in sockets
            for row in rows
        )
    return False


def _target(descriptor: Path) -> str:
    with contextlib.suppress(OSError):  # it is closed by now
        return os.readlink(descriptor)
    return ""


class Cluster:
    """A master, a driver and workers, each on its own machine.

    Each worker can run as many executors as it has cores. The folder has logs and driver programs.
    """

    def __init__(self, machines: list[Machine], folder: Path, cores: int = 1) -> None:
        self._cores = cores
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._machines = machines
        self._on_master, self.on_driver, *self.on_workers = machines
        self.address = f"spark://{self._on_master.host}:7077"

    def start(self) -> None:
        """Start the master and the workers, and wait until the workers are registered."""
        wanted = ["--host", self._on_master.host, "--port", "7077", "--webui-port", "8080"]
        master = self._start_daemon(self._on_master, "master.Master", *wanted)
        logs = [self.folder / f"worker.Worker{each}.log" for each in range(len(self.on_workers))]
        for number, machine in enumerate(self.on_workers):
            wanted = ["--host", machine.host, "--port", "0", "--webui-port", "0"]
            wanted += ["--cores", str(self._cores), "--memory", f"{self._cores * 600}m"]
            wanted += ["--work-dir", str(self.folder / f"work{number}"), self.address]
            self._start_daemon(machine, "worker.Worker", *wanted)
        until(
            lambda: all(REGISTERED in log.read_text() for log in logs),
            "the workers are registered",
            DEADLINE,
        )
        assert master.poll() is None

    def driver(self, source: str, *, with_spark: bool = True, **conf: str) -> Driver:
        """Start a driver program; it finds a session in ``spark``, and reports with ``send``."""
        script = self.folder / f"{uuid.uuid4().hex}-driver.py"
        script.write_text(CHANNEL + (SESSION if with_spark else "") + textwrap.dedent(source))
        return Driver(self, script, self.properties | conf)

    def processes(self) -> list[psutil.Process]:
        """Return all running processes of this cluster and its drivers."""
        return marked(self.mark)

    def listens(self, port: int) -> bool:
        """Return True if a process of this cluster or its drivers listens on a port."""
        return any(listens(process.pid, port) for process in self.processes())

    def find(self, role: str, machine: Machine | None = None) -> list[psutil.Process]:
        """Return the processes with a role, on one machine or on all."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                here = machine is None or process.environ().get("SPARK_LOCAL_IP") == machine.address
                if here and ROLES[role](process):
                    found.append(process)
        return found

    def _start_daemon(self, machine: Machine, name: str, *wanted: str) -> subprocess.Popen[Any]:
        home = spark_home()
        number = self.on_workers.index(machine) if machine in self.on_workers else ""
        with (self.folder / f"{name}{number}.log").open("wb") as log:
            return machine.start(
                [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name}", *wanted],
                env={**self.environment, "SPARK_HOME": home, "SPARK_NO_DAEMONIZE": "1"},
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    @property
    def properties(self) -> dict[str, str]:
        """The properties that a driver's Spark session needs."""
        return {
            "spark.master": self.address,
            "spark.driver.host": self.on_driver.host,
            "spark.driver.bindAddress": self.on_driver.host,
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.ui.enabled": "false",
            "spark.log.level": "OFF",
        }

    @property
    def environment(self) -> dict[str, str]:
        """The variables in the environment of all processes of the cluster."""
        temporary = str(self.temporary)
        return {MARK: self.mark, "PYSPARK_PYTHON": sys.executable, "TMPDIR": temporary}


CHANNEL = """
import faulthandler, json, os, signal, socket, sys, threading, time
from distributor import TorchDistributor

faulthandler.register(signal.SIGUSR1)
_channel = socket.socket(fileno=int(sys.argv[1]))
_lock = threading.Lock()

def send(**facts):
    with _lock:
        _channel.sendall(json.dumps({"at": time.time(), **facts}).encode() + b"\\n")

"""
SESSION = """
from pyspark.sql import SparkSession

builder = SparkSession.builder.appName("tests")
for key, value in json.loads(sys.argv[2]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
send(ready=True)
"""


class Driver:
    """A running driver program; a context manager that ends it."""

    def __init__(self, cluster: Any, script: Path, properties: dict[str, str]) -> None:
        self._cluster = cluster
        self._ours, theirs = socket.socketpair()
        self._reader = self._ours.makefile("r")
        self.log = script.with_suffix(".log")
        with theirs, self.log.open("wb") as log:
            self.process = cluster.on_driver.start(
                [sys.executable, str(script), str(theirs.fileno()), json.dumps(properties)],
                env=cluster.environment,
                stdout=log,
                stderr=log,
                cwd=cluster.folder,
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        self._ours.close()

    def send(self, message: object) -> None:
        """Send the program a line of JSON."""
        self._ours.settimeout(DEADLINE)
        self._ours.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, key: str, timeout: float = DEADLINE) -> dict[str, Any]:
        """Wait for the program's message that has a key, and return it."""
        self._ours.settimeout(timeout)
        with contextlib.suppress(TimeoutError):
            for line in self._reader:
                message: dict[str, Any] = json.loads(line)
                if key in message:
                    return message
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)  # it writes the stacks of its threads
            time.sleep(1)
        raise AssertionError(f"the driver sent no {key!r}:\n{self.log.read_text()[-8000:]}")


def kill(process: psutil.Process) -> float:
    """Kill a process, and return the time by the clock."""
    at = time.time()
    process.send_signal(signal.SIGKILL)
    return at


@contextlib.contextmanager
def cluster_on(
    machines: list[Machine],
    folder: Path,
    *,
    cores: int = 1,
    start: bool = True,
) -> Iterator[Cluster]:
    """Start a cluster, and kill all of its processes at the end."""
    cluster = Cluster(machines, folder, cores)
    try:
        if start:
            cluster.start()
        yield cluster
    finally:
        for process in cluster.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def spark_home() -> str:
    """Return the folder of the Spark that drivers use."""
    if home := os.environ.get("SPARK_HOME"):
        return home
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent)
