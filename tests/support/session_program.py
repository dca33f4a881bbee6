"""A driver program with a Connect session, which runs scenarios as they are asked for.

``python session_program.py FOLDER`` reads names of scenarios from its standard input, one a
line, and prints after each what it found. A Connect session serves other clients meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from pyspark.sql import SparkSession

from distributor import TorchDistributor
from distributor.control import nodes as rendezvous
from distributor.launchers.spark import launcher
from distributor.launchers.spark.hub_address import HubAddress

FOLDER = Path(sys.argv[1])
"""For all that a scenario reads and writes."""


class Broken(Exception):
    """An exception that only this driver has."""


class Notes(logging.Handler):
    """Collects the package's messages about runs, and when they came."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[float, int, str]] = []
        for name in ("distributor", "TorchDistributor"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append((time.monotonic(), record.levelno, record.getMessage()))

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call, and forget all messages."""
        found = [text for _, level, text in self.notes if level >= logging.WARNING]
        self.notes.clear()
        return found


def ranks(number: int = 2, **settings: Any) -> TorchDistributor:
    settings = {"timeout": 60, **settings}
    return TorchDistributor(number, local_mode=False, use_gpu=False, **settings)


# What ranks run


def rank() -> int:
    return int(os.environ["RANK"])


def train(number: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([number + rank()])
    dist.all_reduce(total)
    print("training on", rank())
    return rank(), dist.get_world_size(), int(total.item())


def fail_beside_one_that_waits(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(os.listdir(folder)) < 2:
        assert time.monotonic() < deadline, "the other rank is not up"
        time.sleep(0.02)
    if rank() == 1:
        raise Broken("no", 3)
    threading.Event().wait()


def die_beside_one_that_waits() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def wait_forever() -> None:
    threading.Event().wait()


def make_bytes(megabytes: int, number: int | None = None) -> bytes:
    """Make the bytes of a rank, which is this one unless its number is given."""
    return random.Random(rank() if number is None else number).randbytes(megabytes * 2**20)


def package_files() -> tuple[str, ...]:
    import cloudpickle

    import distributor

    print("in", os.environ["RANK"])
    return str(distributor.__file__), str(cloudpickle.__file__)


def try_to_import(batches: Iterator[Any]) -> Iterator[Any]:
    """Report which packages the Python of Spark's workers has; a worker may have had a run."""
    import os
    import subprocess

    import pyarrow

    found, env = [], {"PATH": os.environ["PATH"]}
    for name in ("distributor", "cloudpickle"):
        done = subprocess.run(["python3", "-c", f"import {name}"], cwd="/", env=env)
        found.append("missing" if done.returncode else name)
    for _ in batches:
        yield pyarrow.RecordBatch.from_pydict({"found": found})


# What scenarios report


def error_of(call: Callable[[], object]) -> Any:
    try:
        call()
    except Exception as error:
        return error
    return None


def described(error: Any) -> list[Any]:
    return [isinstance(error, Broken), [*map(str, error.args)], sorted(error.rank_failures)]


def failure_beside_one_that_waits(distributor: TorchDistributor) -> dict[str, Any]:
    """Let one of two ranks fail, and count the ranks, and those that run 10 s after their run."""
    folder = FOLDER / f"pids-{time.monotonic_ns()}"
    folder.mkdir()
    error = error_of(lambda: distributor.run(fail_beside_one_that_waits, str(folder)))
    deadline = time.monotonic() + 10
    left = pids = os.listdir(folder)
    while left and time.monotonic() < deadline:
        left = [pid for pid in pids if os.path.exists("/proc/" + pid)]
        time.sleep(0.05)
    return {"broken": described(error), "left": [len(pids), left]}


# Scenarios: they get the session and the package's messages, and return what a test asserts on


def values(spark: Any, notes: Notes) -> dict[str, Any]:
    value, large = ranks().run(lambda: (train(10), make_bytes(30)))
    spark.conf.set("spark.distributor.hub.port", "7391")
    try:
        port = TorchDistributor(1, use_gpu=False, warm=False).hub_port
    finally:
        spark.conf.unset("spark.distributor.hub.port")
    return {"value": value, "large": large == make_bytes(30, 0), "port": port}


def bare_executors(spark: Any, notes: Notes) -> dict[str, Any]:
    rows = spark.range(0, 1, 1, 1).mapInArrow(try_to_import, "found string").collect()
    bare = ranks(environment=FOLDER / "bare.tar.gz")
    files = [runs.run_all(package_files) for runs in (ranks(), bare)]
    return {"without": [row.found for row in rows], "files": files}


def ids(shard: Any) -> list[int]:
    return [value for batch in shard.iter_batches() for value in batch["id"].tolist()]


def columns(shard: Any) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in next(iter(shard.iter_batches())).items()}


def dataframes(spark: Any, notes: Notes) -> dict[str, Any]:
    """Run with DataFrames on executors and here, and in a way that fails in Spark."""
    frame = spark.range(0, 101, 1, 3)
    broken = frame.selectExpr("raise_error(concat('bad row ', id)) AS x")
    error = error_of(lambda: ranks().run(ids, broken))
    here = TorchDistributor(2, use_gpu=False, timeout=60)
    return {
        "executors": ranks().run_all(ids, frame),
        "here": here.run_all(ids, frame),
        "odd": ranks().run_all(columns, spark.range(4).selectExpr("id", "-id").toDF("a.b", "A.B")),
        "error": str(error),
    }


def predictions(spark: Any, notes: Notes) -> dict[str, Any]:
    """Predict rows of Spark and of files, and fit, save, load and use a model of Spark ML."""
    import torch
    from pyspark.sql.types import FloatType

    from distributor.data import from_parquet, predict, predict_batch_udf
    from distributor.ml import TorchEstimator, TorchModel

    rows = spark.range(0, 100, 1, 2).selectExpr("id", "array(float(id), 1f) x", "id > 50 label")
    files, stored = str(FOLDER / "files"), str(FOLDER / "model")
    rows.write.parquet(files)

    def load() -> Any:
        return lambda x: x.sum(dim=1)

    def make() -> Any:
        return lambda x: x.sum(axis=1)

    sums = predict_batch_udf(
        make, return_type=FloatType(), batch_size=10, input_tensor_shapes=[[2]]
    )
    found = {
        "rows": predict(rows, load, columns="x", keep=["id"]).collect(),
        "files": predict(from_parquet(files), load, columns="x", keep=["id"]).collect(),
        "udf": rows.select("id", sums("x")).collect(),
    }
    estimator = TorchEstimator(
        module=torch.nn.Linear(2, 2),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam,
        featuresCol="x",
        num_processes=2,
        maxIter=1,
    )
    model = estimator.fit(rows)
    model.save(stored)
    labels = [each.transform(rows).collect() for each in (model, TorchModel.load(stored))]
    return {
        **{way: sorted(map(list, rows)) for way, rows in found.items()},
        "labels": len(labels[0]),
        "loaded": labels[0] == labels[1],
    }


def failures(spark: Any, notes: Notes) -> dict[str, Any]:
    found = failure_beside_one_that_waits(ranks())
    died = error_of(lambda: ranks().run(die_beside_one_that_waits))
    return {**found, "died": [type(died).__name__, getattr(died, "signal", None)]}


def more_ranks_than_slots(spark: Any, notes: Notes) -> dict[str, Any]:
    began = time.monotonic()
    error = error_of(lambda: ranks(4, timeout=None, start_timeout=12).run(train, 10))
    found = {"kind": type(error).__name__, "message": str(error)}
    return {**found, "took": time.monotonic() - began, "value": ranks().run(train, 10)}


def hub_without_nodes() -> Any:
    """Have the nodes connect to an address at which nothing listens."""
    address = HubAddress(bound="127.0.0.1", advertised="127.0.0.2")
    return mock.patch.object(launcher, "choose_hub_address", return_value=address)


def through_spark(spark: Any, notes: Notes) -> dict[str, Any]:
    distributor = ranks(log_dir=str(FOLDER / "logs"))
    with hub_without_nodes():
        found = distributor.run_all(lambda: (train(20), make_bytes(20)))
        warned = notes.take_warnings()
        failure = failure_beside_one_that_waits(distributor)
        argument = distributor.run(len, bytes(3 * 2**20))
    large = [each == make_bytes(20, number) for number, (_, each) in enumerate(found)]
    values = {"values": [value for value, _ in found], "large": large}
    return {**values, **failure, "argument": argument, "warned": warned}


def timeout_without_hub(spark: Any, notes: Notes) -> dict[str, Any]:
    distributor = ranks(timeout=7)
    with hub_without_nodes(), mock.patch.object(rendezvous, "LINK_SECONDS", 2.0):
        error = error_of(lambda: distributor.run(wait_forever))
        ended = time.monotonic()
        before_end = [[ended - at, text] for at, _, text in notes.notes]
        warned = notes.take_warnings()
        value = distributor.run(train, 10)
    found = {"kind": type(error).__name__, "message": str(error), "stacks": error.stacks}
    return {**found, "notes": before_end, "warned": warned, "value": value}


def main() -> None:
    spark, notes = SparkSession.builder.remote("local[2]").getOrCreate(), Notes()
    print("READY", flush=True)
    for line in sys.stdin:
        run(line.strip(), spark, notes)
    spark.stop()


def run(name: str, spark: Any, notes: Notes) -> None:
    """Run a scenario between two lines, the second with what it found, or its traceback."""
    for stream in (sys.stdout, sys.stderr):
        print("BEGIN", name, file=stream, flush=True)
    try:
        found: dict[str, Any] = globals()[name](spark, notes)
        found.setdefault("warned", notes.take_warnings())
    except Exception:
        found = {"traceback": traceback.format_exc()}
    print("\nEND", name, file=sys.stderr, flush=True)
    print("\nEND", name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
