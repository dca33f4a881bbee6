"""Too little room for values without a link, for arguments, and in shared memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import facts_in, needs_java
from support.cluster import Cluster, cluster_on
from support.machines import machines_apart, small_disk, why_not_apart, why_not_mounted
from support.waiting import until

from distributor import (
    ExecutorNotReady,
    TorchDistributor,
    ValueTooLarge,
    WorkerDied,
    load_value,
)
from distributor.control import outcomes
from distributor.core import resources
from distributor.core.resources import format_bytes, lacks_room
from distributor.serialization.outcome import Origin, death

NOT_APART, NOT_MOUNTED = why_not_apart(), why_not_mounted()
needs_namespaces = pytest.mark.skipif(bool(NOT_APART), reason=NOT_APART)
needs_mounts = pytest.mark.skipif(bool(NOT_MOUNTED), reason=NOT_MOUNTED)
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]

WITHOUT_A_LINK = """
def make(megabytes):
    import torch
    return torch.ones(megabytes * 2**20, dtype=torch.uint8)

# The nodes have addresses of their own, and take this one for theirs.
runner = TorchDistributor(2, local_mode=False, use_gpu=False, hub_address="127.0.0.1"{settings})
try:
    send(ending="value", size=len(runner.run(make, {megabytes})))
except BaseException as error:
    send(ending=type(error).__name__, message=str(error))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with machines_apart(4) as machines, cluster_on(machines, folder) as cluster:
        yield cluster


def run_without_link(
    cluster: Cluster, megabytes: int, settings: str = "", **conf: str
) -> dict[str, Any]:
    source = WITHOUT_A_LINK.format(megabytes=megabytes, settings=settings)
    with cluster.driver(source, **conf) as driver:
        return driver.receive("ending")


PRINTS_WITHOUT_A_LINK = """
def train():
    import os
    print("in", os.environ["RANK"])
    print("no end of line", end="")

TorchDistributor(2, local_mode=False, use_gpu=False, hub_address="127.0.0.1").run(train)
send(done=True)
"""


@pytest.mark.slow
@pytest.mark.spark
@needs_namespaces
def test_output_without_a_link_or_a_folder_is_in_the_executors_logs(cluster: Cluster) -> None:
    with cluster.driver(PRINTS_WITHOUT_A_LINK) as driver:
        driver.receive("done")
        assert "in the logs of the executors" in driver.log.read_text()
    for rank in range(2):
        lines = {f"[{rank}] in {rank}", f"[{rank}] no end of line"}
        # Spark copies what its Python workers print.
        until(lambda lines=lines: any(lines <= each for each in logs_of(cluster)), "they are there")


def logs_of(cluster: Cluster) -> list[set[str]]:
    """Return the lines of each executor's log."""
    return [set(path.read_text().splitlines()) for path in cluster.folder.glob("work*/*/*/stderr")]


@pytest.mark.slow
@pytest.mark.spark
@needs_namespaces
def test_a_value_that_spark_cannot_carry_is_saved(cluster: Cluster, tmp_path: Path) -> None:
    limit = {"spark.driver.maxResultSize": "16m"}

    ending = run_without_link(cluster, 40, f", log_dir={str(tmp_path)!r}", **limit)

    assert ending["ending"] == "ValueTooLarge", ending
    assert "takes 41.9 MB" in ending["message"]
    assert "room for 16.8 MB" in ending["message"]
    assert "spark.driver.maxResultSize" in ending["message"]
    [path] = tmp_path.glob("*/*-value-of-rank-0")
    assert f"distributor.load_value('{path}')" in ending["message"]
    value = load_value(path)
    assert len(value) == 40 * 2**20
    assert bool((value == 1).all())


@pytest.mark.slow
@pytest.mark.spark
@needs_namespaces
def test_a_large_value_that_spark_carries_is_saved_too(cluster: Cluster, tmp_path: Path) -> None:
    ending = run_without_link(cluster, 80, f", log_dir={str(tmp_path)!r}")

    assert ending == {**ending, "ending": "value", "size": 80 * 2**20}
    [path] = tmp_path.glob("*/*-value-of-rank-0")
    assert len(load_value(path)) == 80 * 2**20


@pytest.mark.spark
def test_a_value_larger_than_the_drivers_memory_is_saved(
    spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(outcomes, "free_memory", lambda: 50 * 2**20)
    runner = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120, log_dir=tmp_path)

    with pytest.raises(ValueTooLarge) as caught:
        runner.run(lambda: bytes(80 * 2**20))

    assert "the driver has 52.4 MB of memory left" in str(caught.value)
    [path] = tmp_path.glob("*/*-value-of-rank-0")
    assert f"distributor.load_value('{path}')" in str(caught.value)
    assert len(load_value(path)) == 80 * 2**20


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 1\ninactive_file 50"},
        {
            "memory/memory.limit_in_bytes": "1000",
            "memory/memory.usage_in_bytes": "900",
            "memory/memory.stat": "total_inactive_file 50",
        },
    ],
    ids=["v2", "v1"],
)
def test_the_limit_of_the_container_counts(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "CGROUPS", str(tmp_path))
    without_limit = resources.free_memory()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert without_limit > 2**20
    assert resources.free_memory() == 150


ARGUMENTS = """
import json, sys
from pyspark.sql import SparkSession
from distributor import TorchDistributor

builder = SparkSession.builder.master("local[2]").config("spark.local.dir", sys.argv[1])
spark = builder.config("spark.ui.enabled", "false").getOrCreate()

def size_of(data):
    return len(data)

runner = TorchDistributor(2, local_mode=False, use_gpu=False, warm=False)
facts = {"small": runner.run(size_of, b"a" * 100)}
try:
    runner.run(size_of, b"a" * 12_000_000)
except Exception as error:
    facts["kind"], facts["message"] = type(error).__name__, str(error)
print("FACTS " + json.dumps(facts))
"""


@pytest.mark.slow
@pytest.mark.spark
@needs_java
@needs_mounts
def test_arguments_larger_than_an_executors_disk_are_refused(
    run_driver: RunDriver, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        facts = facts_in(run_driver(ARGUMENTS, str(disk)))

    assert facts["small"] == 100
    assert facts["kind"] == ExecutorNotReady.__name__
    assert "the program and its arguments take 12 MB" in facts["message"]
    assert "MB free in " + str(disk) in facts["message"]
    assert "spark.local.dir" in facts["message"]


LOADING = """
import json
from distributor import TorchDistributor

def load():
    import torch
    from torch.utils.data import DataLoader
    for batch in DataLoader(torch.ones(64, 2**20), batch_size=16, num_workers=1):
        assert batch.sum()

try:
    TorchDistributor(1, local_mode=True, use_gpu=False, timeout=120).run(load)
except Exception as error:
    print("FACTS " + json.dumps([type(error).__name__, str(error), str(error.__cause__)]))
"""


@needs_mounts
def test_exhausted_shared_memory_is_reported_with_its_size(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(LOADING)
    commands = f"mount -t tmpfs -o size=8m tmpfs /dev/shm && exec {sys.executable} {script}"

    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", commands], capture_output=True, text=True, timeout=200
    )

    kind, *texts = facts_in(done)
    assert kind == "RuntimeError"
    assert "of 8.39 MB in /dev/shm" in "\n".join(texts)
    assert "--shm-size" in "\n".join(texts)


def test_a_bus_error_is_explained() -> None:
    failure = death(Origin(rank=0, local_rank=0, host="here"), signum=7)

    error = failure.exception()

    assert isinstance(error, WorkerDied)
    assert "killed by SIGBUS" in str(error)
    assert "Free on this host: " in str(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("unable to mmap 67108864 bytes from file </torch_1>"), True),
        (OSError(2, "No such file"), False),
        (ValueError("no space left on device"), False),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_errors_for_lack_of_room_are_recognized(error: Exception, expected: bool) -> None:
    assert lacks_room(error) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (41_943_040, "41.9 MB"), (3.2e12, "3.2 TB")],
)
def test_sizes_are_formatted_with_units(count: float, text: str) -> None:
    assert format_bytes(count) == text
