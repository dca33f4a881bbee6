"""DataFrames of which Spark loses rows."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import facts_in

from distributor.data.chunk_file import DatasetSpec, write_chunks
from distributor.data.epochs import Layout
from distributor.errors import DistributorError

pytestmark = pytest.mark.spark

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


def test_rows_that_spark_has_computed_differently_are_an_error(tmp_path: Path) -> None:
    message = b"rows"
    spec = DatasetSpec(
        name="df",
        schema=pa.schema([]),
        vectors=frozenset(),
        layout=Layout(np.ones(2, np.int64), np.full(2, len(message)), equal=False),
        checksums=np.array([zlib.crc32(message), zlib.crc32(b"other rows")]),
        null_counts={},
    )
    chunks = pa.table(
        {"node": [0] * 2, "dataset": [0] * 2, "chunk": [0, 1], "message": [message] * 2}
    )
    with pytest.raises(DistributorError, match="df has other rows than when the run started"):
        write_chunks(iter(chunks.to_batches()), [spec], 1, str(tmp_path))
    assert not list(tmp_path.iterdir())
