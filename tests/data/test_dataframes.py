"""Spark DataFrames as arguments of runs, on this machine and on executors."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from conftest import facts_in
from support.waiting import until

from distributor import DistributorError, TorchDistributor
from distributor.data import from_spark
from distributor.data.dataframes import DatasetFinder
from distributor.errors import UnpicklableError, WorkerDied
from distributor.ray import ray_launch

pytestmark = pytest.mark.spark

Make = Callable[..., TorchDistributor]
MEGABYTE = 2**20


@pytest.fixture(params=["local", "cluster"])
def ranks(request: pytest.FixtureRequest, spark: Any) -> Make:
    """Make a distributor on CPU ranks, beside the session and on its executors: ``ranks(2)``."""

    def make(num_processes: int = 2, **settings: Any) -> TorchDistributor:
        local_mode = request.param == "local"
        settings = {"timeout": 120, **settings}
        return TorchDistributor(num_processes, local_mode=local_mode, use_gpu=False, **settings)

    return make


here = pytest.mark.parametrize("ranks", ["local"], indirect=True)
"""For tests whose run on executors is the same."""


@pytest.fixture
def on_executors(spark: Any) -> Make:
    def make(num_processes: int = 2, **settings: Any) -> TorchDistributor:
        settings = {"timeout": 120, **settings}
        return TorchDistributor(num_processes, local_mode=False, use_gpu=False, **settings)

    return make


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Any:
    """Check that Spark keeps no rows after a test, however its runs ended."""
    yield
    if "spark" in request.fixturenames:
        context = request.getfixturevalue("spark").sparkContext
        assert dict(context._jsc.getPersistentRDDs()) == {}


def ids(shard: Any, column: str = "id") -> list[int]:
    return [value for batch in shard.iter_batches() for value in batch[column].tolist()]


def test_each_row_reaches_one_rank(ranks: Make, spark: Any) -> None:
    frame = spark.range(0, 1003, 1, 7).selectExpr("id", "cast(id AS string) AS text")

    def read(shard: Any, factor: int) -> tuple[list[int], list[str], int]:
        texts = [text for batch in shard.iter_batches() for text in batch["text"].tolist()]
        return ids(shard), texts, shard.count() * factor

    shares = ranks(2).run_all(read, from_spark(frame, equal=False), factor=1)
    assert [len(found) for found, _, _ in shares] == [count for _, _, count in shares] == [501, 502]
    assert sorted(number for found, _, _ in shares for number in found) == list(range(1003))
    assert all(texts == list(map(str, found)) for found, texts, _ in shares)


@here
def test_data_frames_in_lists_tuples_and_dicts(ranks: Make, spark: Any) -> None:
    first, second = spark.range(10), spark.range(100, 104)

    def read(pair: Any, named: Any, whole: Any) -> list[list[int]]:
        return [ids(pair[0]), ids(pair[1][0]), ids(named["again"]), ids(whole)]

    arguments = ([first, (second,)], {"again": first}, from_spark(spark.range(3), split=False))
    one, other = ranks(2).run_all(read, *arguments)
    assert [sorted(a + b) for a, b in zip(one[:2], other[:2], strict=True)] == [
        list(range(10)),
        list(range(100, 104)),
    ]
    assert one[2] == one[0], "it is the same dataset"
    assert one[3] == other[3] == [0, 1, 2]


@here
def test_shares_are_padded_or_cut(ranks: Make, spark: Any, capfd: Any) -> None:
    frame = spark.range(0, 7, 1, 3)

    def read(*shards: Any) -> list[list[int]]:
        return [ids(shard) for shard in shards]

    one, other = ranks(2).run_all(read, frame, from_spark(frame, equal="drop"))
    assert (len(one[0]), len(other[0])) == (4, 4)
    assert sorted({*one[0], *other[0]}) == list(range(7))
    assert sorted(one[1] + other[1]) == list(range(6))
    shown = capfd.readouterr().err
    assert re.search(r"shards\[0\]: 7 rows .* 4 for each of 2 ranks; 1 row repeated", shown)
    assert re.search(r"shards\[1\]: 7 rows .* 3 for each of 2 ranks; 1 row dropped", shown)


def test_ranks_of_one_node_share_a_file(spark: Any) -> None:
    def file_of(shard: Any) -> tuple[int, int]:
        from distributor.rank.context import worker_context

        descriptor = worker_context().data
        assert descriptor is not None
        status = os.fstat(descriptor)
        return status.st_ino, status.st_nlink

    one, other = TorchDistributor(2, use_gpu=False).run_all(file_of, spark.range(4))
    assert one == other
    assert one[1] == 0, "it has no name"


def test_rows_that_were_read_take_no_memory_of_a_rank(spark: Any) -> None:
    """They are mapped, and would count as the rank's where YARN adds up resident memory."""

    def read(shard: Any) -> tuple[int, int]:
        def mapped() -> int:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").open())
            return int(status["RssFile"].split()[0]) * 1024

        before = mapped()
        rows = sum(len(batch["id"]) for batch in shard.iter_torch_batches(batch_size=None))
        return rows, mapped() - before

    rows, left = TorchDistributor(1, use_gpu=False).run(read, spark.range(6_000_000))
    assert rows == 6_000_000
    assert left < 10 * MEGABYTE, "of 48"


IN_ONE_PROCESS = """
import json
import torch
from pyspark.sql import SparkSession
from distributor import DistributorError, TorchDistributor

spark = SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false").getOrCreate()


def ids(shard):
    return torch.cat([batch["id"] for batch in shard.iter_torch_batches()]).tolist()


frame = spark.range(0, 11, 1, 3)
facts = {
    place: TorchDistributor(2, local_mode=place == "here", use_gpu=False).run_all(ids, frame)
    for place in ("here", "executors")
}
print("FACTS " + json.dumps(facts))
"""


@pytest.mark.slow
def test_a_master_that_has_its_executor_in_the_driver(
    run_driver: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python workers are the driver's Python, although the system's python3 is another one."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    system = tmp_path / "bin" / "python3"
    system.parent.mkdir()
    system.write_text("#!/bin/sh\nexit 1\n")
    system.chmod(0o755)
    path = os.pathsep.join([str(system.parent), os.environ["PATH"]])
    facts = facts_in(run_driver(IN_ONE_PROCESS, env={"PATH": path}))
    for shares in facts.values():
        assert list(map(len, shares)) == [6, 6]
        assert sorted({*chain(*shares)}) == list(range(11))


# Failures


def test_rows_are_freed_after_a_failed_run(on_executors: Make, spark: Any) -> None:
    def die(shard: Any) -> None:
        os.kill(os.getpid(), 9)

    with pytest.raises(WorkerDied):
        on_executors(2).run(die, spark.range(4))


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def stream(spark: Any) -> Any:
    return spark.readStream.format("rate").load()


REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda spark: spark.range(0), ValueError, "The DataFrame df has no rows"),
    (lambda spark: spark.range(1), ValueError, "df has 1 row, which are too few for 2 ranks"),
    (
        lambda spark: spark.range(3).selectExpr("id", "id AS x", "2 * id AS x"),
        ValueError,
        "df has several columns of the name 'x'",
    ),
    (
        lambda spark: spark.range(3).selectExpr("id", "array(interval 1 month) AS x"),
        TypeError,
        "Column 'x' of the DataFrame df has the type .*interval",
    ),
    (stream, ValueError, "streaming DataFrame has no end"),
    (lambda spark: spark.newSession().range(3), ValueError, "df belongs to another Spark session"),
    (lambda spark: Holder(spark.range(3)), UnpicklableError, "in a list, tuple or dict among them"),
    (lambda spark: from_spark(3), TypeError, "takes a Spark DataFrame, but got .*int"),
    (
        lambda spark: from_spark(spark.range(3), equal="cut"),  # type: ignore[arg-type]
        ValueError,
        "'pad', 'drop' or False.*'cut'",
    ),
    (
        lambda spark: from_spark(spark.range(3), split=1),  # type: ignore[arg-type]
        TypeError,
        "split must be True or False",
    ),
]


def test_what_is_refused_before_the_start(spark: Any, tmp_path: Path) -> None:
    started, script = tmp_path / "started", tmp_path / "train.py"
    ranks = TorchDistributor(2, use_gpu=False)
    for make, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            ranks.run(lambda df: started.touch(), df=make(spark))
    script.write_text("")
    with pytest.raises(TypeError, match="argument 0 is a DataFrame"):
        ranks.run(str(script), spark.range(3))
    frame = spark.range(4).selectExpr("raise_error(concat('bad row ', id)) AS x")
    with pytest.raises(Exception, match="bad row") as caught:
        ranks.run(lambda df: started.touch(), frame)
    assert not isinstance(caught.value, DistributorError), "it is Spark's"
    assert not started.exists()


def test_a_run_is_cancelled_while_spark_computes(on_executors: Make, spark: Any) -> None:
    def never_end(batches: Any) -> Any:
        import threading

        threading.Event().wait()
        yield from batches

    tracker = spark.sparkContext.statusTracker()
    frame = spark.range(0, 4, 1, 2).mapInArrow(never_end, "id long")
    future = on_executors(2).submit(lambda shard: None, frame)
    until(lambda: tracker.getActiveStageIds(), "Spark computes the DataFrame", 60)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(60)
    until(lambda: not tracker.getActiveStageIds(), "Spark's job has ended", 60)


ODD_NAMES = ["a", "a.b", "A", "*", "", "a`b", "`a`", "a'\"b", "a\nb", "a/b", "c1", "日本 c"]


@here
def test_columns_of_any_name(ranks: Make, spark: Any) -> None:
    values = [f"IF(id = 3, NULL, id + {at}) AS c" for at in range(len(ODD_NAMES))]
    frame = spark.range(0, 6, 1, 2).selectExpr(*values).toDF(*ODD_NAMES)
    structs = spark.range(2).selectExpr("named_struct('x.y', id, 'X.Y', id + 1) AS `s.t`")

    def read(shard: Any, nested: Any) -> tuple[list[str], list[Any], list[Any]]:
        [columns] = shard.iter_torch_batches(batch_size=None, fill=dict.fromkeys(shard.names, 0))
        [inner] = nested.iter_torch_batches(batch_size=None)
        return (
            shard.names,
            [columns[name].tolist() for name in shard.names],
            [(name, values.tolist()) for name, values in inner["s.t"].items()],
        )

    names, columns, fields = ranks(1).run(read, frame, structs)
    assert names == ODD_NAMES
    assert columns == [
        [0 if row == 3 else row + at for row in range(6)] for at in range(len(ODD_NAMES))
    ]
    assert fields == [("x.y", [0, 1]), ("X.Y", [1, 2])]


def test_a_function_on_ray_takes_no_data_frame(spark: Any) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    function = ray_launch(use_gpu=False)(lambda options: None)
    with pytest.raises(TypeError, match=r"options\['df'\] is a Spark DataFrame.*read_parquet"):
        function.distributed(options={"df": spark.range(3)})


def names_of(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Return the names of DataFrames among the arguments of a function."""
    finder = DatasetFinder()
    finder.replace_in(args, kwargs, function)
    return [dataset.name for dataset in finder.datasets]


def test_data_frames_are_named_by_the_parameters(spark: Any) -> None:
    def train(learning_rate: float, users: Any, *others: Any, test: Any = None) -> None: ...

    one, two, three, four = (spark.range(3) for _ in range(4))
    names = names_of(train, 0.1, one, two, [three], test={"all": four})
    assert names == ["users", "others[0]", "others[1][0]", "test['all']"]
    assert names_of(partial(train, 0.1), from_spark(one)) == ["users"]
    assert names_of(print, one) == ["args[0]"]
    assert names_of("train.py", "--lr", one) == ["argument 1"]
