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
import contextlib
import json
import os
import sys
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from distributor import train
from distributor.data import from_spark
from distributor.train.torch import TorchTrainer

folder, driver = Path(sys.argv[1]), os.getpid()
spark = (
    SparkSession.builder.master("local-cluster[2,1,1024]")
    .config("spark.ui.enabled", "false")
    .getOrCreate()
)


def computed(name):
    return len(list(folder.glob(f"{name} computed *")))


def numbers(name, changes):
    def rows(batches):
        for batch in batches:
            part = TaskContext.get().partitionId()
            first = 1000 if changes and list(folder.glob(f"{name} computed {part} *")) else 0
            (folder / f"{name} computed {part} {os.getpid()}").touch()
            yield pa.record_batch([pa.array(n + first for n in batch["id"].to_pylist())], ["id"])

    return spark.range(0, 40, 1, 8).mapInArrow(rows, "id long")


def is_executor(process):
    with contextlib.suppress(psutil.Error):  # it has ended
        return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    return False


def wait_for_both_executors():
    spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(list).collect()


def loop(config):
    import threading

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "0":
            next(filter(is_executor, psutil.Process(driver).children(recursive=True))).kill()
        threading.Event().wait()
    batches = train.get_dataset_shard("train").iter_batches()
    found = [number for batch in batches for number in batch["id"].tolist()]
    (folder / f"{config['name']} {os.environ['RANK']}").write_text(json.dumps(found))


facts = {}
for name, changes in (("same", False), ("changed", True)):
    wait_for_both_executors()  # each then computes some of the rows
    trainer = TorchTrainer(
        loop,
        train_loop_config={"name": name},
        datasets={"train": from_spark(numbers(name, changes), equal=False)},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=str(folder / "runs"),
            name=name,
            failure_config=train.FailureConfig(max_failures=1),
        ),
    )
    try:
        trainer.fit()
        facts[name] = [json.loads((folder / f"{name} {rank}").read_text()) for rank in (0, 1)]
    except Exception as error:
        facts[name] = f"{type(error).__name__}: {error}"
    facts[f"{name} computed"] = computed(name)
facts["kept"] = len(spark.sparkContext._jsc.getPersistentRDDs())
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
    assert facts["kept"] == 0


FILLING = """
import json
import os
import shutil
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from distributor import TorchDistributor

disk = sys.argv[1]
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.local.dir", disk)
    .getOrCreate()
)


def rows(megabytes):
    return spark.range(0, megabytes * 2**17, 1, 4).selectExpr("rand(7) AS x")


def first_batch(shard):
    import torch

    [first] = next(iter(shard.iter_torch_batches(batch_size=1)))["x"]
    assert isinstance(first, torch.Tensor)


def error_of(megabytes):
    try:
        distributor = TorchDistributor(1, use_gpu=False, timeout=100)
        distributor.run(first_batch, rows(megabytes))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


empty = shutil.disk_usage(disk).used
errors = [error_of(megabytes) for megabytes in (24, 60, 4)]
deadline = time.monotonic() + 30  # Spark removes files in the background
while (left := shutil.disk_usage(disk).used - empty) > 2**21 and time.monotonic() < deadline:
    time.sleep(0.1)
files = [str(path) for path in Path(disk).rglob("*") if path.is_file()]
print("FACTS " + json.dumps({"errors": errors, "left": left, "files": files}))
"""


@pytest.mark.slow
@needs_mounts
def test_a_full_disk_of_the_driver(
    run_driver: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 40) as disk:
        facts = facts_in(run_driver(FILLING, str(disk)))
    of_file, of_spark, none = facts["errors"]
    assert "The rows of the DataFrames cannot be written to" in of_file
    assert "spark.local.dir" in of_file
    assert "a disk is full" in of_spark
    assert "spark.local.dir" in of_spark
    assert none is None, "a smaller DataFrame has room afterwards"
    assert facts["left"] <= 2 * MEGABYTE, facts["files"]  # this package, for executors


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
