"""``@ray_launch``: its Ray clusters, and that nothing is left of them, however a run ends."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from support.cluster import DEADLINE, cluster_on
from support.driver_process import driver
from support.machines import machines_apart, why_not_apart
from support.ray_clusters import (
    assert_ended,
    assert_files_and_processes_ended,
    assert_nodes_ended,
    describe,
    nodes_used,
)
from support.waiting import assert_gone, until

from distributor import DistributorError, ExecutorNotReady, air, runtime
from distributor.core.files import create_elsewhere, remove_scratch
from distributor.node.agent.worker_env import RANK_VARIABLES
from distributor.rank.store_channel import StoreChannel
from distributor.ray import RayProgram, ray_launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
STARTED = 240.0
"""Seconds until a function runs on its cluster, at most."""


class Broken(Exception):
    pass


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Create a folder in which sockets can be created: pytest's has too long a path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow(ci=True)
@needs_ray
def test_a_function_drives_a_cluster_of_its_own(tmp_path: Path) -> None:
    @ray_launch(use_gpu=False, env={"HOME": str(tmp_path)}, timeout=STARTED)
    def sum_of_powers(count: int, *, power: int) -> tuple[Any, ...]:
        import ray

        def raise_to_power(x: int) -> tuple[int, list[str]]:
            return x**power, sorted(RANK_VARIABLES & os.environ.keys())

        task = ray.remote(raise_to_power)
        results = ray.get([task.remote(x) for x in range(count)])
        identity = [found for _, found in results] + [sorted(RANK_VARIABLES & os.environ.keys())]
        address = ray.get(ray.remote(lambda: os.environ["RAY_ADDRESS"]).remote())
        return sum(x for x, _ in results), identity, runtime.get_world_size(), address, describe()

    value, identity, world_size, address, cluster = sum_of_powers.distributed(4, power=2)

    assert value == 14
    assert identity == [[]] * 5, "frameworks would wait for other ranks"
    assert world_size == 1
    assert address == cluster["address"], "tasks find their own cluster among others"
    assert cluster["cpus"] == os.cpu_count()
    [node] = cluster["nodes"]
    assert node.startswith("node0-")
    assert_ended(cluster)
    assert list(tmp_path.iterdir()) == [], "nothing in the home folder"


@needs_ray
@pytest.mark.slow
def test_nothing_is_left_after_an_exception(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TEMP_DIR", str(short_folder))

    @ray_launch(use_gpu=False, timeout=STARTED)
    def fail() -> None:
        raise Broken(describe())

    with pytest.raises(Broken) as caught:
        fail.distributed()

    cluster = caught.value.args[0]
    assert any(Path(folder).parent == short_folder for folder in cluster["folders"])
    assert_ended(cluster)
    assert list(short_folder.iterdir()) == []


DRIVER = """
import json, sys, threading
from pathlib import Path
sys.path.append(sys.argv[1])
from support.ray_clusters import describe
from distributor.ray import ray_launch

@ray_launch(use_gpu=False)
def stay(folder):
    note = Path(folder, "note")
    note.with_suffix(".part").write_text(json.dumps(describe()))
    note.with_suffix(".part").rename(note)
    threading.Event().wait()

if __name__ == "__main__":
    stay.distributed(sys.argv[2])
"""


@needs_ray
@pytest.mark.slow
def test_nothing_is_left_if_the_driver_is_killed(tmp_path: Path) -> None:
    with driver(DRIVER, tmp_path, str(Path(__file__).parent), str(tmp_path)) as (process, _):
        until((tmp_path / "note").exists, "the function runs", 140)
        process.kill()
        process.wait(30)

        assert_ended(json.loads((tmp_path / "note").read_text()))


def stay(note: str) -> None:
    path = Path(note)
    path.with_suffix(".part").write_text(json.dumps(describe()))
    path.with_suffix(".part").rename(path)
    threading.Event().wait()


@needs_ray
@pytest.mark.slow
def test_nothing_is_left_of_a_cancelled_run(tmp_path: Path) -> None:
    note = tmp_path / "note"
    future = ray_launch(use_gpu=False)(stay).distributed_async(str(note))
    until(note.exists, "the function runs", STARTED)

    assert future.cancel()
    assert_ended(json.loads(note.read_text()))


@needs_ray
@pytest.mark.slow
@pytest.mark.spark
def test_clusters_at_the_same_time_do_not_know_each_other(spark: Any, tmp_path: Path) -> None:
    """Each function waits until the other one runs."""

    @ray_launch(gpus=2, remote=True, use_gpu=False, timeout=STARTED)
    def see(me: str, other: str) -> dict[str, Any]:
        (tmp_path / me).touch()
        until((tmp_path / other).exists, "the other cluster is there", STARTED)
        nodes_used(2)
        return describe()

    futures = [see.distributed_async("a", "b"), see.distributed_async("b", "a")]
    first, second = (future.result(2 * STARTED) for future in futures)

    assert len(first["nodes"]) == len(second["nodes"]) == 2
    assert first["address"] != second["address"]
    assert not {*first["folders"]} & {*second["folders"]}
    assert_ended(first)
    assert_ended(second)


@needs_ray
@pytest.mark.slow
@pytest.mark.spark
def test_a_node_that_dies_fails_the_run(spark: Any, tmp_path: Path) -> None:
    note = tmp_path / "note"
    future = ray_launch(gpus=2, remote=True, use_gpu=False)(stay).distributed_async(str(note))
    until(note.exists, "the function runs", STARTED)
    cluster = json.loads(note.read_text())
    raylets = [each for each in psutil.process_iter() if is_raylet_of(each, cluster)]
    [other] = [each for each in raylets if each.pid not in cluster["pids"]]
    other.kill()

    with pytest.raises(DistributorError, match=r"Ray node node1-.* has ended \(exit code 1\)"):
        future.result(120)
    assert_ended(cluster)
    assert_gone(raylets)


def is_raylet_of(process: psutil.Process, cluster: dict[str, Any]) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    is_raylet = bool(command) and command[0].endswith("/raylet")
    return is_raylet and any(cluster["address"] in part for part in command)


TWO_HOSTS = """
sys.path.append({tests!r})
from support.ray_clusters import describe, nodes_used, train_with_ray
from distributor.ray import ray_launch

settings = dict(gpus=2, remote=True, use_gpu=False, timeout=240)

@ray_launch(**settings)
def train():
    import ray

    addresses = sorted(node["NodeManagerAddress"] for node in ray.nodes())
    return addresses, train_with_ray({storage!r}), nodes_used(2), describe()

@ray_launch(**settings)
def look():
    return nodes_used(2), describe()

addresses, trained, *run = train.distributed()
send(addresses=addresses, trained=trained, run=run)
_channel.recv(100)
send(runs=[look.distributed() for _ in range(3)])
time.sleep(1000)
"""


@needs_ray
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.skipif(bool(why_not_apart()), reason=why_not_apart())
def test_ray_data_and_ray_train_on_two_hosts_leave_nothing(tmp_path: Path) -> None:
    source = TWO_HOSTS.format(tests=str(Path(__file__).parent), storage=str(tmp_path / "results"))
    with machines_apart(4) as machines, cluster_on(machines, tmp_path) as cluster:
        hosts = cluster.on_workers

        def ports() -> list[set[int]]:
            return [host.listening_ports() for host in hosts]

        with cluster.driver(source, **{"spark.cores.max": "2"}) as spark_driver:
            first = spark_driver.receive("run", DEADLINE + 2 * STARTED)
            assert first["addresses"] == sorted(host.address for host in hosts)
            assert first["trained"] == {"sum_of_squares": 328350, "sum_of_ranks": 3, "hosts": 2}
            assert_run_ended(first["run"])
            before = ports()
            assert int(first["run"][1]["address"].rpartition(":")[2]) not in set.union(*before)

            spark_driver.send("go on")
            runs = spark_driver.receive("runs", 10 * STARTED)["runs"]
            assert len(runs) == 3
            for run in runs:
                assert_run_ended(run)
            until(lambda: ports() == before, "ports are left")
        assert list(cluster.temporary.glob("pymp-*")) == []


def assert_run_ended(run: list[Any]) -> None:
    used, ray_cluster = run
    assert_nodes_ended(used)
    assert_files_and_processes_ended(ray_cluster)


# Without a cluster


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")

    with pytest.raises(ImportError, match=r"pip install 'torch-spark-distributor\[ray\]'"):
        ray_launch(use_gpu=False)(stay).distributed("a")
    with pytest.raises(ImportError, match=r"pip install 'torch-spark-distributor\[ray\]'"):
        air.ray_init()
    with pytest.raises(
        ExecutorNotReady, match=r"On .*: Ray is not installed\. Install the driver's"
    ):
        RayProgram(stay, 60.0, None)("a")


def test_each_run_has_its_own_token() -> None:
    launched = ray_launch(use_gpu=False, env={"MINE": "x"})(stay)
    first, second = (launched._launcher().env for _ in range(2))

    assert first["MINE"] == second["MINE"] == "x"
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_a_scratch_folder_is_removed_with_the_one_elsewhere(tmp_path: Path) -> None:
    scratch, parent, foreign = tmp_path / "pymp-1", tmp_path / "parent", tmp_path / "foreign"
    scratch.mkdir()  # create_scratch would keep multiprocessing of this process there
    Path(create_elsewhere(str(scratch), str(parent)), "file").touch()
    remove_scratch(str(scratch))
    assert [*tmp_path.iterdir(), *parent.iterdir()] == [parent]

    foreign.mkdir()
    scratch.mkdir()
    (scratch / "elsewhere").symlink_to(foreign)
    remove_scratch(str(scratch))
    assert sorted(tmp_path.iterdir()) == [foreign, parent], "the program's link is not followed"


def test_nodes_take_no_value_that_another_program_has_set() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    channel = StoreChannel(0, 2, store)
    channel.set("address", "ours")
    assert channel.get("address") == "ours"
    store.set("address", json.dumps("of another program"))
    with pytest.raises(DistributorError, match="'address' is not what a rank has sent"):
        channel.get("address")
