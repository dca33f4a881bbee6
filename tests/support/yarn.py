"""Run a YARN cluster on this machine: ``PYTHONPATH=tests python -m support.yarn FOLDER``.

One JVM has the real ResourceManager and NodeManagers of Hadoop, whose containers are processes of
this machine, and with ``--dfs`` HDFS as the default file system. It runs until SIGINT or SIGTERM,
and then nothing is left of it but the jars. PySpark has all jars but those in `ARTIFACTS`: they
are downloaded to the folder ``--jars`` once, from Maven Central.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlretrieve
from xml.sax.saxutils import escape

import psutil

from support.cluster import spark_home

ARTIFACTS = (
    "org.apache.hadoop:hadoop-client-minicluster:{hadoop}",
    "org.bouncycastle:bcprov-jdk18on:1.82",
    "org.bouncycastle:bcpkix-jdk18on:1.82",
    "org.bouncycastle:bcutil-jdk18on:1.82",
    "org.junit.jupiter:junit-jupiter-api:5.13.4",
    "org.junit.platform:junit-platform-commons:1.13.4",
    "org.opentest4j:opentest4j:1.3.0",
)
MAVEN_CENTRAL = "https://repo.maven.apache.org/maven2"
GATEWAY = ("py4j.GatewayServer", "--die-on-broken-pipe", "0")
PR_SET_CHILD_SUBREAPER = 36
NODES, READY_MILLISECONDS = 2, 60_000
MEMORY, CORES = "6144", "8"
"""MiB and cores of each node."""


def jars_of(folder: Path) -> list[Path]:
    """Return the jars of the cluster; those that the folder does not have are downloaded to it."""
    [client] = Path(spark_home(), "jars").glob("hadoop-client-api-*.jar")
    hadoop = client.stem.rpartition("-")[2]
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for artifact in ARTIFACTS:
        group, name, version = artifact.format(hadoop=hadoop).split(":")
        path = folder / f"{name}-{version}.jar"
        if not path.exists():
            address = f"{MAVEN_CENTRAL}/{group.replace('.', '/')}/{name}/{version}/{path.name}"
            print(f"downloading {address}", file=sys.stderr)
            part, _ = urlretrieve(address, path.with_suffix(".part"))
            part.rename(path)
        paths.append(path)
    return paths


def properties(gpus: int) -> dict[str, str]:
    """Return what differs from Hadoop's defaults, which are for machines that do nothing else."""
    gpu, queue = "yarn.io/gpu", "yarn.scheduler.capacity"
    preemption = "yarn.resourcemanager.monitor.capacity.preemption"
    found = {
        "yarn.nodemanager.resource.memory-mb": MEMORY,
        "yarn.minicluster.yarn.nodemanager.resource.memory-mb": MEMORY,
        "yarn.nodemanager.resource.cpu-vcores": CORES,
        "yarn.scheduler.minimum-allocation-mb": "128",
        "yarn.scheduler.maximum-allocation-mb": MEMORY,
        "yarn.scheduler.maximum-allocation-vcores": CORES,
        # Memory is watched as on clusters without cgroups, each second.
        "yarn.nodemanager.pmem-check-enabled": "true",
        "yarn.nodemanager.vmem-check-enabled": "false",
        "yarn.minicluster.control-resource-monitoring": "true",
        "yarn.nodemanager.resource.memory.enforced": "false",
        "yarn.nodemanager.container-monitor.interval-ms": "1000",
        "yarn.nodemanager.disk-health-checker.enable": "false",
        "yarn.minicluster.fixed.ports": "false",
        # What the queue of urgent applications lacks is taken from the other at once.
        "yarn.resourcemanager.scheduler.monitor.enable": "true",
        f"{preemption}.monitoring_interval": "500",
        f"{preemption}.max_wait_before_kill": "1000",
        f"{preemption}.total_preemption_per_round": "1.0",
        f"{preemption}.natural_termination_factor": "1.0",
        "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
        f"{queue}.root.queues": "default,urgent",
        f"{queue}.root.default.capacity": "10",
        f"{queue}.root.default.user-limit-factor": "10",
        f"{queue}.root.urgent.capacity": "90",
        f"{queue}.maximum-am-resource-percent": "1.0",
        f"{queue}.node-locality-delay": "-1",
        f"{queue}.resource-calculator": (
            "org.apache.hadoop.yarn.util.resource.DominantResourceCalculator"
        ),
    }
    if gpus:
        found["yarn.resource-types"] = gpu
        found[f"yarn.resource-types.{gpu}.maximum-allocation"] = str(gpus)
        found[f"yarn.nodemanager.resource-type.{gpu}"] = str(gpus)
    return found


def write(path: Path, found: dict[str, str]) -> None:
    """Write a configuration file of Hadoop."""
    rows = (
        f"<property><name>{k}</name><value>{escape(v)}</value></property>" for k, v in found.items()
    )
    path.write_text("<configuration>\n{}\n</configuration>\n".format("\n".join(rows)))


@contextlib.contextmanager
def java(folder: Path, jars: list[Path]) -> Iterator[Any]:
    """Start a JVM whose classes py4j can call, and end it with all that it has started."""
    from py4j.java_gateway import GatewayParameters, JavaGateway

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # containers outlive their NodeManager
    classes = [folder / "server", folder / "conf", *jars, f"{spark_home()}/jars/*"]
    settings = ["-Xmx768m", "-Djava.net.preferIPv4Stack=true", f"-Dtest.build.data={folder}/data"]
    settings += [f"-Dhadoop.log.dir={folder}/logs", "--add-opens=java.base/java.lang=ALL-UNNAMED"]
    process = subprocess.Popen(
        ["java", *settings, "-cp", ":".join(map(str, classes)), *GATEWAY],
        stdin=subprocess.PIPE,  # the JVM ends when this process does
        stdout=subprocess.PIPE,
        stderr=(folder / "java.log").open("w"),
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))},
    )
    try:
        assert process.stdout
        port = int(process.stdout.readline())
        yield JavaGateway(gateway_parameters=GatewayParameters(port=port, auto_convert=True))
    finally:
        while left := psutil.Process().children(recursive=True):
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(left, 5)


def start(gateway: Any, folder: Path, known: dict[str, str], *, dfs: bool) -> None:
    """Start the daemons, and write the configuration of their clients."""
    hadoop = gateway.jvm.org.apache.hadoop
    conf = hadoop.yarn.conf.YarnConfiguration()
    conf.set("hadoop.tmp.dir", f"{folder}/tmp")
    for key, value in known.items():
        conf.set(key, value)
    default = "file:///"
    if dfs:
        conf.set("dfs.replication", "1")
        builder = getattr(hadoop.hdfs, "MiniDFSCluster$Builder")(conf)
        storage = builder.numDataNodes(1).build()
        storage.waitActive()
        default = str(storage.getURI().toString())
        conf.set("fs.defaultFS", default)
    cluster = hadoop.yarn.server.MiniYARNCluster("yarn", NODES, 1, 1)
    cluster.init(conf)
    cluster.start()
    if not cluster.waitForNodeManagersToConnect(READY_MILLISECONDS):
        raise TimeoutError("the NodeManagers have not reached the ResourceManager")
    ours = cluster.getConfig()
    addresses = [f"yarn.resourcemanager.{each}address" for each in ("", "scheduler.", "webapp.")]
    found = {key: ours.get(key) for key in [*known, *addresses] if ours.get(key)}
    write(folder / "conf" / "yarn-site.xml", found)
    write(folder / "conf" / "core-site.xml", {"fs.defaultFS": default})
    write(folder / "conf" / "hdfs-site.xml", {"dfs.replication": "1"})


def main() -> None:
    """Run a cluster until this process receives SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser("yarn", description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder; it is removed at the end")
    parser.add_argument("--jars", type=Path, default=Path.home() / ".cache/yarn-jars")
    parser.add_argument("--gpus", type=int, default=0, help="of each node, which are only counted")
    parser.add_argument("--dfs", action="store_true", help="HDFS is the default file system")
    options = parser.parse_args()
    folder, known = options.folder.resolve(), properties(options.gpus)
    for name in ("conf", "server", "logs", "data", "tmp"):
        (folder / name).mkdir(parents=True)
    for name in ("capacity-scheduler.xml", "resource-types.xml", "node-resources.xml"):
        write(folder / "server" / name, known)
    for name in ("capacity-scheduler.xml", *(["resource-types.xml"] if options.gpus else [])):
        write(folder / "conf" / name, known)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        with java(folder, jars_of(options.jars.resolve())) as gateway:
            start(gateway, folder, known, dfs=options.dfs)
            print(f"export HADOOP_CONF_DIR={folder}/conf", flush=True)
            ended.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
