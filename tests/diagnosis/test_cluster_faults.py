"""`distributor.doctor` on machines with networks of their own: sound, and with each thing broken.

Most tests share a Spark application, whose machines they break and repair.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, Driver, cluster_on
from support.doctor import EXAMINE, Found
from support.machines import Machine, machines_apart, why_not_apart, why_not_mounted

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
        return Found(self._driver.receive("report")["report"]["checks"])

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


@pytest.mark.slow
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


@needs_mounts
@pytest.mark.slow(ci=True)
def test_storage_that_is_not_shared(application: Application, tmp_path: Path) -> None:
    """Another file system is mounted on the folder, for one worker and its executors."""
    [worker] = application.cluster.find("worker", application.other)
    inside = ["nsenter", "--mount", "--target", str(worker.pid)]
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "distributor-test", str(tmp_path)]
    subprocess.run([*inside, *mount], check=True, capture_output=True)
    try:
        check = application.only("storage", storage_path=str(tmp_path))
    finally:
        unmount = ["umount", "-l", str(tmp_path)]
        subprocess.run([*inside, *unmount], check=True, capture_output=True)
    assert check["where"] == application.other.address
    assert "a file that the driver wrote is missing there" in check["found"]
    assert str(tmp_path) in check["found"]


def hosts_of(cluster: Cluster) -> str:
    return ", ".join(sorted(machine.address for machine in cluster.on_workers))


NO_PYTHON = """
os.environ["PYSPARK_PYTHON"] = "/nowhere/python"
import json, sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.appName("tests")
for key, value in json.loads(sys.argv[2]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
"""


def test_an_interpreter_that_does_not_exist(cluster: Cluster) -> None:
    source = NO_PYTHON + EXAMINE + "\nexamine()\n"
    with cluster.driver(source, with_spark=False, **{"spark.cores.max": "2"}) as driver:
        found = Found(driver.receive("report")["report"]["checks"])

    assert found.having("failure").keys() == {"run"}, found.text
    check = found.having("failure")["run"]
    assert "There is no Python at '/nowhere/python'" in check["found"]
    assert "PYSPARK_PYTHON" in check["found"]
    unknown = {"versions", "network to the driver", "network between executors"}
    assert unknown <= found.having("not checked").keys()
