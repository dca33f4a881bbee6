"""Driver programs on clusters and machines with simulated GPUs.

Spark learns about GPUs only from a discovery script, so a script that echoes addresses simulates
them. Each configuration has a driver process of its own.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CLUSTER = "local-cluster[2,2,1024]"
TOO_MANY_PROCESSES = (
    "'num_processes' cannot be set to a value greater than the number of available GPUs on the "
    "driver, which is 2. 'num_processes' was reset to be equal to the number of available GPUs."
)

DRIVER = """
import json, os, sys, time
from distributor import TorchDistributor

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK CUDA_VISIBLE_DEVICES".split()
facts = {}

def rank_facts():
    # Each executor of local-cluster has its own working directory.
    return {**{name: os.environ.get(name) for name in NAMES}, "executor": os.getcwd()}

def run_ranks(num_processes, local_mode=False, use_gpu=True, **settings):
    settings = {"timeout": 120, **settings}
    return TorchDistributor(num_processes, local_mode, use_gpu, **settings).run_all(rank_facts)

def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return [[kind.__name__ for kind in type(error).__mro__], str(error)]
"""

START_SPARK = """
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
from pyspark.sql import SparkSession

builder = SparkSession.builder.config("spark.ui.enabled", "false")
for key, value in json.loads(sys.argv[1]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
"""


class DriverReport(NamedTuple):
    """The facts that a driver program prints, and its standard error."""

    facts: dict[str, Any]
    stderr: str


RunGpuDriver = Callable[..., DriverReport]


@pytest.fixture
def run_gpu_driver(
    run_driver: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> RunGpuDriver:
    """Run the lines of a driver program that fill ``facts``; start Spark if there is a ``conf``."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(lines: str, conf: dict[str, str] | None = None, **environment: str) -> DriverReport:
        start = "" if conf is None else START_SPARK
        source = DRIVER + start + textwrap.dedent(lines) + "\nprint(json.dumps(facts))"
        done = run_driver(source, json.dumps(conf), env=environment)
        return DriverReport(json.loads(done.stdout.splitlines()[-1]), done.stderr)

    return run


def write_script(folder: Path, name: str, *lines: str) -> str:
    """Write an executable shell script, and return its path."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def make_discovery_script(tmp_path: Path) -> Callable[..., str]:
    """Make a discovery script that reports the given GPU addresses."""

    def make(*addresses: str) -> str:
        found = json.dumps({"name": "gpu", "addresses": addresses})
        return write_script(tmp_path, "discover.sh", f"echo '{found}'")

    return make


def cluster_conf(discovery_script: str) -> dict[str, str]:
    """Return the configuration of a cluster with GPUs on its executors."""
    return {
        "spark.master": CLUSTER,
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": discovery_script,
        "spark.executor.resource.gpu.amount": "2",
    }


def local_conf(discovery_script: str, gpus: int) -> dict[str, str]:
    """Return the configuration of a local master with GPUs on its driver."""
    return {
        "spark.master": "local[2]",
        "spark.driver.resource.gpu.amount": str(gpus),
        "spark.driver.resource.gpu.discoveryScript": discovery_script,
    }


def check_numbers(ranks: list[dict[str, str]], world_size: int, per_task: int) -> None:
    """Check the rank numbers of a run with `per_task` ranks in each task."""
    names = ["RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"]
    assert [[int(rank[name]) for name in names] for rank in ranks] == [
        [rank, rank // per_task, rank % per_task, per_task, world_size]
        for rank in range(world_size)
    ]


def check_gpus(
    ranks: list[dict[str, str]], per_task: int, gpus: set[str], sharers: int = 1
) -> None:
    """Check that each task has one GPU per rank, and that at most `sharers` tasks share a GPU."""
    users: Counter[tuple[str, str]] = Counter()
    for first in range(0, len(ranks), per_task):
        task = ranks[first : first + per_task]
        masks = {rank["CUDA_VISIBLE_DEVICES"] for rank in task}
        assert len(masks) == 1, task
        entries = masks.pop().split(",")
        assert len(set(entries)) == len(entries) == per_task
        assert set(entries) <= gpus
        users.update((task[0]["executor"], entry) for entry in entries)
    assert max(users.values()) <= sharers, users
