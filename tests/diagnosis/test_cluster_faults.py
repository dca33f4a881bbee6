"""`distributor.doctor` on machines with networks of their own: sound, and with each thing broken.

Most tests share a Spark application, whose machines they break and repair.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import DEADLINE, Cluster, Driver, cluster_on
from support.doctor import EXAMINE, ONCE, Found, examined, found_in
from support.machines import Machine, machines_apart, why_not_apart, why_not_mounted
from support.packages import python_that_begins

pytestmark = [pytest.mark.slow, pytest.mark.spark]

NOT_APART, NOT_MOUNTED = why_not_apart(), why_not_mounted()
needs_mounts = pytest.mark.skipif(bool(NOT_MOUNTED), reason=NOT_MOUNTED)
if NOT_APART:
    pytest.skip(NOT_APART, allow_module_level=True)

RANK_PORTS = "28672-28927"
SERVE = """
for line in _channel.makefile():
    examine(**json.loads(line))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster of two workers of two cores each."""
    folder = tmp_path_factory.mktemp("cluster")
    with machines_apart(4) as machines, cluster_on(machines, folder, cores=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def hub(cluster: Cluster) -> Machine:
    """Return a further address of the driver's machine."""
    return cluster.on_driver.also_elsewhere()


class Application:
    """A Spark application with an executor on each worker, which is examined."""

    def __init__(self, cluster: Cluster, driver: Driver) -> None:
        self.cluster = cluster
        self.one, self.other = cluster.on_workers
        self._driver = driver

    def examine(self, **settings: object) -> Found:
        self._driver.send(settings)
        return found_in(self._driver.receive("report")["report"])

    def only(self, name: str, **settings: object) -> dict[str, str]:
        """Examine, and return the one check that has failed."""
        found = self.examine(**settings)
        wrong = found.having("failure")
        assert wrong.keys() == {name}, found.text
        return wrong[name]


@pytest.fixture(scope="module")
def application(cluster: Cluster) -> Iterator[Application]:
    # What Spark sends, an executor may look for at the other one, which it does not always reach.
    soon = {"spark.shuffle.io.connectionCreationTimeout": "2s", "spark.shuffle.io.maxRetries": "0"}
    with cluster.driver(EXAMINE + SERVE, **{"spark.cores.max": "2"}, **soon) as driver:
        yield Application(cluster, driver)


@pytest.mark.slow(ci=True)
def test_a_sound_cluster_has_no_failure(application: Application, tmp_path: Path) -> None:
    found = application.examine(storage_path=str(tmp_path))

    assert not found.having("failure") | found.having("warning"), found.text
    right = found.having("ok")
    assert right["run"]["found"].startswith("2 ranks started")
    hosts = hosts_of(application.cluster)
    places = {right[name]["where"] for name in ("run", "network between executors", "storage")}
    assert places == {hosts}
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.slow(ci=True)
def test_executors_that_cannot_reach_each_other(application: Application) -> None:
    """One of two has rank 0, to which the other connects as the run starts."""
    one, other = application.one, application.other
    one.lose(other)
    try:
        check = application.only("run")
    finally:
        one.reach(other)
    found = re.search(r"executor on (\S+) cannot reach rank 0's at (\S+):\d+ ", check["found"])
    assert found, check
    assert set(found.groups()) == {one.address, other.address}
    assert "rank_ports" in check["found"]


@pytest.mark.slow(ci=True)
def test_executors_that_reach_only_the_port_of_rank_0(application: Application) -> None:
    one, other = application.one, application.other
    one.lose_ports(other, except_from=28672)
    try:
        check = application.only("network between executors", rank_ports=RANK_PORTS)
    finally:
        one.reach_ports()
    for source, target in ((one, other), (other, one)):
        assert f"{source.address} to {target.address} at {target.address}:" in check["found"]
    assert "rank_ports" in check["fix"]


@pytest.mark.slow(ci=True)
def test_a_blocked_port_of_the_driver(application: Application, hub: Machine) -> None:
    application.one.lose(hub)
    try:
        check = application.only("network to the driver", hub_address=hub.address)
    finally:
        application.one.reach(hub)

    assert check["where"] == application.one.address
    assert f"to the driver at {hub.address}:" in check["found"]
    assert "hub_port" in check["fix"]


@pytest.mark.slow(ci=True)
def test_too_few_slots(application: Application) -> None:
    check = application.only("slots", num_processes=5)
    assert "5 barrier tasks are wanted at once" in check["found"]
    assert "spark.cores.max" in check["fix"]


@pytest.mark.slow(ci=True)
def test_gpus_that_are_not_configured(application: Application) -> None:
    check = application.only("GPUs", num_processes=None, gpus=2)
    assert "spark.task.resource.gpu.amount" in check["found"]


@contextlib.contextmanager
def mounted(machine: Machine, cluster: Cluster, folder: str | Path, size: str) -> Iterator[None]:
    """Mount a file system on a folder of one machine: on its worker's, and on its executors'."""
    [worker] = cluster.find("worker", machine)
    inside = ["nsenter", "--mount", "--target", str(worker.pid)]
    options = ["-t", "tmpfs", "-o", f"size={size}", "distributor-test"]
    subprocess.run([*inside, "mount", *options, str(folder)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", "-l", str(folder)], check=True, capture_output=True)


@needs_mounts
@pytest.mark.slow(ci=True)
def test_storage_that_is_not_shared(application: Application, tmp_path: Path) -> None:
    with mounted(application.other, application.cluster, tmp_path, "10m"):
        check = application.only("storage", storage_path=str(tmp_path))
    assert check["where"] == application.other.address
    assert "a file that the driver wrote is missing there" in check["found"]
    assert str(tmp_path) in check["found"]


@needs_mounts
@pytest.mark.slow(ci=True)
def test_little_shared_memory(application: Application) -> None:
    with mounted(application.one, application.cluster, "/dev/shm", "8m"):
        check = application.only("shared memory")
    assert check["where"] == application.one.address
    assert "8.39 MB free in /dev/shm" in check["found"]
    assert "--shm-size" in check["fix"]


@needs_mounts
@pytest.mark.slow(ci=True)
def test_a_full_disk(application: Application) -> None:
    folder = application.cluster.temporary
    with mounted(application.one, application.cluster, folder, "20m"):
        check = application.only("disk")
    assert check["where"] == application.one.address
    assert f"free in {folder}" in check["found"]


def hosts_of(cluster: Cluster) -> str:
    return ", ".join(sorted(machine.address for machine in cluster.on_workers))


DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.executor.cores": "1",
}


def test_dynamic_allocation(cluster: Cluster) -> None:
    found = examined(cluster, **DYNAMIC)

    assert not found.having("failure") | found.having("warning"), found.text
    right = found.having("ok")
    assert "2 tasks" in right["slots"]["found"]
    assert right["run"]["found"].startswith("2 ranks started")
    assert right["network to the driver"]["where"] == hosts_of(cluster)
    assert right["network between executors"]["where"] == hosts_of(cluster)


def test_a_limit_of_dynamic_allocation(cluster: Cluster) -> None:
    limit = {**DYNAMIC, "spark.dynamicAllocation.maxExecutors": "1"}
    found = examined(cluster, **limit)

    assert found.having("failure").keys() == {"slots"}, found.text
    check = found.having("failure")["slots"]
    assert "2 tasks are wanted at once" in check["found"]
    assert "never have room for more than 1" in check["found"]
    assert "'spark.dynamicAllocation.maxExecutors' is 1" in check["found"]
    assert "1 rank started" in found.having("ok")["run"]["found"]


def test_a_driver_whose_name_does_not_resolve(cluster: Cluster) -> None:
    found = examined(cluster, **{"spark.driver.host": "no-such-host.invalid"})

    assert found.having("failure").keys() == {"slots"}, found.text
    assert "spark.driver.host=no-such-host.invalid" in found.having("failure")["slots"]["found"]
    assert "run" in found.having("not checked")


OWN_PYTHON = """
os.environ["PYSPARK_PYTHON"] = {python!r}
import json, sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.appName("tests")
for key, value in json.loads(sys.argv[2]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
"""


def examined_with(cluster: Cluster, python: str) -> Found:
    """Examine executors that have an interpreter of their own."""
    source = OWN_PYTHON.format(python=python) + EXAMINE + ONCE
    return examined(cluster, source, with_spark=False)


def test_an_interpreter_that_does_not_exist(cluster: Cluster) -> None:
    found = examined_with(cluster, "/nowhere/python")

    assert found.having("failure").keys() == {"run"}, found.text
    check = found.having("failure")["run"]
    assert "There is no Python at '/nowhere/python'" in check["found"]
    assert "PYSPARK_PYTHON" in check["found"]
    unknown = {"versions", "network to the driver", "network between executors"}
    assert unknown <= found.having("not checked").keys()


WITHOUT_TORCH = """
import os, sys
from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else super().find_spec(name, path, target)

if os.environ.get("SPARK_LOCAL_IP") == {without!r}:
    sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
"""


def test_an_executor_without_torch(cluster: Cluster, tmp_path: Path) -> None:
    without = cluster.on_workers[0].address
    source = WITHOUT_TORCH.format(without=without)

    found = examined_with(cluster, str(python_that_begins(tmp_path / "python", source)))

    assert found.having("failure").keys() == {"run"}, found.text
    check = found.having("failure")["run"]
    assert f"executor on {without} runs Python" in check["found"]
    assert "has no torch" in check["found"]
    assert "PYSPARK_PYTHON" in check["found"]


def test_different_versions_of_torch(cluster: Cluster, tmp_path: Path) -> None:
    one, other = (machine.address for machine in cluster.on_workers)
    another = tmp_path / "other" / "torch-2.4.0.dist-info"
    another.mkdir(parents=True)
    (another / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n")
    source = f"""
        import os, sys
        if os.environ.get("SPARK_LOCAL_IP") == {other!r}:
            sys.path.insert(0, {str(another.parent)!r})
    """

    found = examined_with(cluster, str(python_that_begins(tmp_path / "python", source)))

    check = found.having("failure")["run"]
    assert "differ in torch" in check["found"]
    assert f"2.4.0 on {other}" in check["found"]
    assert f" on {one}" in check["found"]
    assert "environment=" in check["found"]


def test_the_command_line_finds_a_sound_cluster(cluster: Cluster, tmp_path: Path) -> None:
    import sys

    options = ["--cluster", "--master", cluster.address, "--nproc", "2", "--json"]
    for key, value in {**cluster.properties, "spark.cores.max": "2"}.items():
        options += ["--conf", f"{key}={value}"] if key != "spark.master" else []
    process = cluster.on_driver.start(
        [sys.executable, "-m", "distributor", "doctor", *options],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
    )
    output, errors = process.communicate(timeout=DEADLINE)

    assert process.returncode == 0, output + errors
    assert '"failure": 0' in output
