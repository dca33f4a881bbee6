"""Too little room for values without a link, for arguments, and in shared memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import facts_in, needs_java
from support.cluster import cluster_on
from support.machines import machines_apart, small_disk, why_not_apart, why_not_mounted

from distributor import (
    DistributorError,
    TorchDistributor,
    ValueTooLarge,
    WorkerDied,
    load_value,
)
from distributor.control import nodes as outcomes
from distributor.serialization.outcome import Origin, death

NOT_APART, NOT_MOUNTED = why_not_apart(), why_not_mounted()
needs_namespaces = pytest.mark.skipif(bool(NOT_APART), reason=NOT_APART)
needs_mounts = pytest.mark.skipif(bool(NOT_MOUNTED), reason=NOT_MOUNTED)
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]

WITHOUT_A_LINK = """
def make():
    import torch
    return torch.ones(40 * 2**20, dtype=torch.uint8)

# The nodes have addresses of their own, and take this one for theirs.
where = dict(local_mode=False, hub_address="127.0.0.1", log_dir={log_dir!r})
try:
    TorchDistributor(2, use_gpu=False, **where).run(make)
except BaseException as error:
    send(ending=type(error).__name__, message=str(error))
"""


@pytest.mark.slow
@pytest.mark.spark
@needs_namespaces
def test_a_value_that_spark_cannot_carry_is_saved(tmp_path: Path) -> None:
    source = WITHOUT_A_LINK.format(log_dir=str(tmp_path / "logs"))
    limit = {"spark.driver.maxResultSize": "16m"}
    with (
        machines_apart(4) as machines,
        cluster_on(machines, tmp_path) as cluster,
        cluster.driver(source, **limit) as driver,
    ):
        ending = driver.receive("ending")

    assert ending["ending"] == "ValueTooLarge", ending
    assert "takes 41.9 MB" in ending["message"]
    assert "room for 16.8 MB" in ending["message"]
    assert "spark.driver.maxResultSize" in ending["message"]
    [path] = tmp_path.glob("logs/*/*-value-of-rank-0")
    assert f"distributor.load_value('{path}')" in ending["message"]
    value = load_value(path)
    assert len(value) == 40 * 2**20
    assert bool((value == 1).all())


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
def test_arguments_larger_than_the_drivers_disk_are_refused(
    run_driver: RunDriver, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        facts = facts_in(run_driver(ARGUMENTS, str(disk)))

    assert facts["small"] == 100
    assert facts["kind"] == DistributorError.__name__
    assert "'size_of' takes 12 MB to the ranks" in facts["message"]
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


@pytest.mark.slow
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
    failure = death(Origin(rank=0, local_rank=0, host="here"), -7)

    error = failure.exception()

    assert isinstance(error, WorkerDied)
    assert "killed by SIGBUS" in str(error)
    assert "Free on this host: " in str(error)
