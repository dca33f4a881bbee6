"""Spark sessions, a standalone cluster, and the lower bound of runs through Spark."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.floors import free_port
from benchmarks.measure import ROOT, environment

LOCAL = "local"
"""The place that needs no Spark."""
EMBEDDED = "local-cluster[2,2,1024]"
IN_DRIVER = "local[1]"
"""Master for PySpark's class in local mode, which only reads the configuration."""
RANKS = 2
LOOPBACK = "127.0.0.1"
START_SECONDS = 60.0
WARM_UPS = 2


@contextmanager
def session(place: str, **more: str) -> Iterator[Any]:
    """Create a Spark session and start its executors and their Python workers; none for `LOCAL`.

    `more` are properties.
    """
    if place == LOCAL:
        yield None
        return
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(place).appName("benchmarks")
    for key, value in {**_properties(place), **more}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    try:
        for _ in range(0 if place == IN_DRIVER else WARM_UPS):
            empty_stage(spark, RANKS)
        yield spark
    finally:
        spark.stop()


def _properties(place: str) -> dict[str, str]:
    properties = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        # Large values: PySpark's class would fail at Spark's default limits.
        "spark.driver.memory": "6g",
        "spark.driver.maxResultSize": "0",
    }
    properties |= managers().get(place, {})
    if place.startswith("spark://"):
        # Two executors on the one worker.
        properties |= {
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.driver.host": LOOPBACK,
        }
    return properties


def managers() -> dict[str, dict[str, str]]:
    """Return the masters of the clusters of YARN and Kubernetes, with the properties they need.

    The variables that name the clusters are those of `make test-yarn` and `make test-kubernetes`.
    Executors read this project and PySpark's jars from the paths that they have here.
    """
    variables = os.environ
    executors = {
        "spark.executor.instances": str(RANKS),
        "spark.executor.cores": "1",
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "1500m",
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.driver.memory": "1g",
    }
    found = {}
    if "HADOOP_CONF_DIR" in variables:
        jars = f"local:{_packaged_spark()}/jars/*"
        found["yarn"] = {**executors, "spark.yarn.jars": jars}
    if "KUBERNETES_MASTER" in variables:
        namespace = variables.get("KUBERNETES_NAMESPACE", "default")
        found[variables["KUBERNETES_MASTER"]] = {
            **executors,
            "spark.kubernetes.container.image": variables["KUBERNETES_IMAGE"],
            "spark.kubernetes.namespace": namespace,
        }
        if host := variables.get("KUBERNETES_DRIVER_HOST"):
            found[variables["KUBERNETES_MASTER"]]["spark.driver.host"] = host
    return found


def empty_stage(spark: Any, tasks: int) -> None:
    """Run a barrier stage whose tasks do nothing."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        yield from ()

    frame = spark.range(0, tasks, 1, tasks).mapInArrow(task, "nothing int", barrier=True)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            frame.collect()
            return
        except Exception:
            # Spark refuses a barrier stage until enough executors have registered.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@contextmanager
def stage(place: str, ranks: int) -> Iterator[Callable[..., Any]]:
    """Run an empty barrier stage instead of the function."""
    with session(place) as spark:
        yield lambda function, *args: empty_stage(spark, ranks)


@contextmanager
def standalone() -> Iterator[tuple[str, list[int]]]:
    """Start a standalone cluster: a master and one worker.

    Yields
    ------
    tuple of str and list of int
        Address of the master, and the processes of the cluster.
    """
    port = free_port()
    master = f"spark://{LOOPBACK}:{port}"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        wanted = ["--host", LOOPBACK, "--port", str(port), "--webui-port", "0"]
        first = stack.enter_context(_daemon("master.Master", wanted, folder))
        _await_port(port)
        wanted = ["--host", LOOPBACK, "--port", "0", "--webui-port", "0"]
        wanted += ["--cores", "2", "--memory", "1200m", "--work-dir", folder, master]
        second = stack.enter_context(_daemon("worker.Worker", wanted, folder))
        yield master, [first, second]


@contextmanager
def _daemon(name: str, arguments: list[str], folder: str) -> Iterator[int]:
    home = os.environ.get("SPARK_HOME") or _packaged_spark()
    command = [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name}", *arguments]
    daemon = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment(), "SPARK_HOME": home, "SPARK_NO_DAEMONIZE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield daemon.pid
    finally:
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _packaged_spark() -> str:
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent)


def _await_port(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((LOOPBACK, port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
