"""DataFrames of which Spark loses rows, and disks that have no room for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import facts_in
from support.machines import small_disk, why_not_mounted

from distributor.data.chunk_file import DatasetSpec, write_chunks
from distributor.data.epochs import Layout
from distributor.errors import DistributorError, ExecutorNotReady

pytestmark = pytest.mark.spark

WHY_NOT = why_not_mounted()
needs_mounts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
MEGABYTE = 2**20

LOSING = """
import contextlib, json, os, sys
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from distributor import TorchDistributor
from distributor.data import from_spark

folder, driver = Path(sys.argv[1]), os.getpid()
builder = SparkSession.builder.master("local-cluster[2,1,1024]")
spark = builder.config("spark.ui.enabled", "false").getOrCreate()


def numbers(name, changes):
    def rows(batches):
        for batch in batches:
            part = TaskContext.get().partitionId()
            first = 1000 if changes and list(folder.glob(f"{name} {part} *")) else 0
            (folder / f"{name} {part} {os.getpid()}").touch()
            yield pa.record_batch([pa.array(n + first for n in batch["id"].to_pylist())], ["id"])

    return spark.range(0, 40, 1, 8).mapInArrow(rows, "id long")


def is_executor(process):
    with contextlib.suppress(psutil.Error):  # it has ended
        return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    return False


def read(shard):
    import threading
    import torch  # without this line, the tests' processes do not find it

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "0":
            next(filter(is_executor, psutil.Process(driver).children(recursive=True))).kill()
        threading.Event().wait()
    return [number for batch in shard.iter_batches() for number in batch["id"].tolist()]


facts = {}
for name in ("same", "changed"):
    # Both executors are there, and each computes some of the rows.
    spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(list).collect()
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False, max_failures=1)
    try:
        rows = from_spark(numbers(name, name == "changed"), equal=False)
        facts[name] = ranks.run_all(read, rows)
    except Exception as error:
        facts[name] = f"{type(error).__name__}: {error}"
    facts[f"{name} computed"] = len(list(folder.glob(f"{name} *")))
print("FACTS " + json.dumps(facts))
"""


@pytest.mark.slow
def test_rows_of_a_lost_executor_are_computed_again_and_must_be_the_same(
    run_driver: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    python = {"PYSPARK_PYTHON": sys.executable}
    facts = facts_in(run_driver(LOSING, str(tmp_path), env=python))
    assert isinstance(facts["same"], list), facts["same"]
    assert sorted(chain(*facts["same"])) == list(range(40))
    assert facts["same computed"] > 8
    assert "has other rows than when the run started" in facts["changed"]


def messages(count: int) -> tuple[DatasetSpec, Iterator[pa.RecordBatch]]:
    """Return a dataset of one chunk of a megabyte for each of `count` messages."""
    import zlib

    content = bytes(MEGABYTE)
    spec = DatasetSpec(
        name="df",
        schema=b"",
        vectors=frozenset(),
        chunk_rows=np.ones(count, np.int64),
        chunk_bytes=np.full(count, MEGABYTE),
        checksums=np.full(count, zlib.crc32(content)),
        null_counts={},
        equal=False,
        split=True,
    )
    assert isinstance(spec.layout, Layout)
    columns: dict[str, Any] = {"node": [0], "dataset": [0]}
    batches = (
        pa.record_batch({**columns, "chunk": [chunk], "message": [content]})
        for chunk in range(count)
    )
    return spec, batches


@needs_mounts
def test_a_full_disk_of_an_executor(tmp_path: Path) -> None:
    spec, batches = messages(8)
    with small_disk(tmp_path / "disk", 4) as disk:
        with pytest.raises(ExecutorNotReady, match=r"No space left.*spark.local.dir"):
            write_chunks(batches, [spec], 1, str(disk))
        assert not list(disk.iterdir())


def test_rows_that_spark_has_computed_differently_are_an_error(tmp_path: Path) -> None:
    spec, batches = messages(2)
    spec.checksums[1] += 1
    with pytest.raises(DistributorError, match="df has other rows than when the run started"):
        write_chunks(batches, [spec], 1, str(tmp_path))
    assert not list(tmp_path.iterdir())
