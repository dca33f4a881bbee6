"""Sessions on YARN and Kubernetes, whatever cluster is there; how to start one is in CONTRIBUTING.

A session is a driver program of its own that runs the code that it is sent, so that many tests
share its executors.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.cluster import CHANNEL, SESSION, Driver, spark_home
from support.machines import Machine
from support.waiting import MARK, comes_true, marked

SECONDS = 300.0
"""Seconds for a session to start, and for what it is sent."""
EXECUTOR = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "900m",
    "spark.ui.enabled": "false",
    "spark.log.level": "OFF",
    # Executors start in half the time.
    "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}
ENVIRONMENT = {
    "yarn": ("spark.executorEnv", "spark.yarn.appMasterEnv"),
    "kubernetes": ("spark.executorEnv",),
}
"""Prefixes of the properties that set variables of executors and of application masters."""
AT_ONCE = {"spark.scheduler.maxRegisteredResourcesWaitingTime": "1s"}
"""A session does not wait for executors, which will not come."""

ENDS_IN = 60.0
"""Seconds until nothing is left of a session that has ended."""

LOOP = """
def ranks(count, **settings):
    settings = {"use_gpu": False, "start_timeout": 120, "timeout": 240, **settings}
    return TorchDistributor(count, local_mode=False, **settings)

def executor_of_rank():
    import os, psutil
    processes = psutil.Process().parents()
    if "SPARK_EXECUTOR_POD_NAME" in os.environ:  # in which a failed task leaves orphans
        processes = psutil.process_iter()
    return next(each for each in processes if each.name() == "java")

def yarn_client():
    yarn = spark._jvm.org.apache.hadoop.yarn
    client = yarn.client.api.YarnClient.createYarnClient()
    client.init(yarn.conf.YarnConfiguration(spark._jsc.hadoopConfiguration()))
    client.start()
    return client, yarn.api.records

for line in _channel.makefile():
    message = json.loads(line)
    names = {**globals(), **message["names"], "__name__": "__main__"}
    try:
        exec(compile(message["source"], "<test>", "exec"), names)
        ending = {"result": names.get("result")}
    except BaseException as error:
        ending = {"error": type(error).__name__, "message": str(error)}
    send(ending=ending)
"""


class Failed(Exception):
    """What a session was sent has raised an exception of this kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


@dataclass
class ManagedSession:
    """A driver program with a Spark session."""

    driver: Driver
    mark: str
    """The value of `MARK` in the environment of all of its processes."""

    def run(self, source: str, **names: Any) -> Any:
        """Run code in the driver, which has ``spark`` and `LOOP`; return its ``result``."""
        self.send(source, **names)
        return self.result()

    def send(self, source: str, **names: Any) -> None:
        """Have the driver run code; `result` waits for it."""
        self.driver.send({"source": textwrap.dedent(source), "names": names})

    def result(self) -> Any:
        """Wait for the code that was sent, as `run` does."""
        ending = self.driver.receive("ending", SECONDS)["ending"]
        if "error" in ending:
            raise Failed(ending["error"], ending["message"])
        return ending["result"]


@dataclass
class Manager:
    """A cluster manager, and what Spark needs to use it."""

    name: str
    folder: Path
    """For driver programs and their logs."""
    properties: dict[str, str]
    environment: dict[str, str]
    """The variables of drivers."""
    storage: str
    """A folder, by path or address, that drivers and executors can write to, if there is one."""

    @property
    def on_driver(self) -> Machine:
        """The machine of drivers, which is this one."""
        return Machine(self.properties["spark.driver.host"])

    @contextlib.contextmanager
    def session(self, executors: int | None = 2, **conf: str) -> Iterator[ManagedSession]:
        """Start a session with so many executors, and end it; nothing of it may be left.

        The number is left to Spark if it is None.
        """
        script = self.folder / f"driver-{len(os.listdir(self.folder))}.py"
        script.write_text(CHANNEL + SESSION + LOOP)
        mark = secrets.token_hex(8)
        counted = {} if executors is None else {"spark.executor.instances": str(executors)}
        wanted = {**self.properties, **counted, **conf}
        wanted |= {f"{prefix}.{MARK}": mark for prefix in ENVIRONMENT[self.name]}
        environment = {**self.environment, MARK: mark}
        with Driver(replace(self, environment=environment), script, wanted) as driver:
            driver.receive("ready", SECONDS)
            yield ManagedSession(driver, mark)
            with contextlib.suppress(OSError):  # the test has killed it
                driver.send({"source": "spark.stop()", "names": {}})
                driver.receive("ending", SECONDS)
        comes_true(lambda: not marked(mark), ENDS_IN)
        assert not (left := marked(mark)), f"processes of {script} are left: {left}"


def why_missing(name: str) -> str:
    """Return why there is no cluster of this kind for tests; empty if there is one."""
    variable = {"yarn": "HADOOP_CONF_DIR", "kubernetes": "KUBERNETES_MASTER"}[name]
    return "" if os.environ.get(variable) else f"{variable} is not set: no cluster is known"


def properties_of_hadoop(name: str) -> dict[str, str]:
    """Return the properties in a file of HADOOP_CONF_DIR; none if it does not exist."""
    path = Path(os.environ.get("HADOOP_CONF_DIR", ""), name)
    if not path.is_file():
        return {}
    entries = ET.parse(path).iter("property")
    return {each.findtext("name", ""): each.findtext("value", "") for each in entries}


def nearly_a_node() -> dict[str, str]:
    """Return the properties of executors that take a node of YARN, but for small containers."""
    allocation = "yarn.scheduler.maximum-allocation-mb"
    most = int(properties_of_hadoop("yarn-site.xml").get(allocation, 8192))
    return {"spark.executor.memoryOverhead": f"{most - 1200}m"}


def manager(name: str, folder: Path) -> Manager:
    """Return a cluster manager, as the environment variables of the tests describe it."""
    common = {**EXECUTOR, "spark.driver.host": _own_address(name)}
    if name == "yarn":
        jars = f"local:{spark_home()}/jars/*"  # else each session copies all of them
        properties = {
            "spark.master": "yarn",
            "spark.yarn.am.memory": "256m",
            "spark.yarn.am.extraJavaOptions": EXECUTOR["spark.executor.extraJavaOptions"],
            "spark.yarn.jars": os.environ.get("YARN_SPARK_JARS", jars),
            "spark.yarn.scheduler.heartbeat.interval-ms": "500",
        }
        python = os.environ.get("YARN_PYTHON", sys.executable)
        default = properties_of_hadoop("core-site.xml").get("fs.defaultFS", "")
        storage = f"{default}/tmp/distributor-tests" if default.startswith("hdfs:") else str(folder)
        environment = {"PYSPARK_PYTHON": python}
        return Manager(name, folder, common | properties, environment, storage)
    properties = {
        "spark.master": os.environ["KUBERNETES_MASTER"],
        "spark.kubernetes.container.image": os.environ["KUBERNETES_IMAGE"],
        "spark.kubernetes.namespace": os.environ.get("KUBERNETES_NAMESPACE", "default"),
    }
    storage = os.environ.get("KUBERNETES_STORAGE", "")
    if storage.startswith("/"):  # a folder of the one node, which is this machine
        volume = "spark.kubernetes.executor.volumes.hostPath.storage"
        properties |= {f"{volume}.mount.path": storage, f"{volume}.options.path": storage}
    environment = {"PYSPARK_PYTHON": os.environ.get("KUBERNETES_PYTHON", "python3")}
    return Manager(name, folder, common | properties, environment, storage)


def _own_address(name: str) -> str:
    """Return the address of this machine to which executors connect."""
    if given := os.environ.get(f"{name.upper()}_DRIVER_HOST"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))  # nothing is sent; the kernel chooses the address
        return str(sock.getsockname()[0])


def gpus_of_a_node(name: str) -> int:
    """Return how many GPUs a node of the cluster has, real or not; 0 if that is not known."""
    if name == "kubernetes":
        return int(os.environ.get("KUBERNETES_GPUS", 0))
    known = properties_of_hadoop("resource-types.xml")
    return int(known.get("yarn.resource-types.yarn.io/gpu.maximum-allocation", 0))
