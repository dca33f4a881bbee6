"""Spark DataFrames as arguments of runs, on this machine and on executors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from distributor import DistributorError, TorchDistributor
from distributor.data import from_spark
from distributor.errors import UnpicklableError, WorkerDied

pytestmark = pytest.mark.spark

Make = Callable[..., TorchDistributor]
MEGABYTE = 2**20


@pytest.fixture
def on_executors(spark: Any) -> TorchDistributor:
    return TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Any:
    """Check that Spark keeps no rows after a test, however its runs ended."""
    yield
    context = request.getfixturevalue("spark").sparkContext
    assert dict(context._jsc.getPersistentRDDs()) == {}


def ids(shard: Any) -> list[int]:
    return [value for batch in shard.iter_batches() for value in batch["id"].tolist()]


def test_each_row_reaches_one_rank(distribute: Make, spark: Any) -> None:
    frame = spark.range(0, 1003, 1, 7).selectExpr("id", "cast(id AS string) AS text")

    def read(shard: Any, factor: int) -> tuple[list[int], list[str], int]:
        texts = [text for batch in shard.iter_batches() for text in batch["text"].tolist()]
        return ids(shard), texts, shard.count() * factor

    shares = distribute(2).run_all(read, from_spark(frame, equal=False), factor=1)
    assert [len(found) for found, _, _ in shares] == [count for _, _, count in shares] == [501, 502]
    assert sorted(number for found, _, _ in shares for number in found) == list(range(1003))
    assert all(texts == list(map(str, found)) for found, texts, _ in shares)


def test_a_frame_beside_a_large_program(spark: Any, capfd: Any) -> None:
    """Only ranks can load the arguments, so that nobody knows which of them is large."""
    large = bytes(2**20)

    def count(shard: Any) -> int:
        return len(large) + int(shard.count())

    assert TorchDistributor(2, local_mode=False, use_gpu=False).run(count, spark.range(8)) == (
        len(large) + 4
    )
    assert "'count' takes 1.05 MB to the ranks. It is sent" in capfd.readouterr().err


ODD_NAMES = ["a", "a.b", "A", "*", "", "a`b", "a'\"b", "a\nb", "日本 c"]


def test_data_frames_in_lists_and_dicts_padded_cut_or_whole(spark: Any, capfd: Any) -> None:
    frame, other = spark.range(0, 7, 1, 3), spark.range(100, 104)
    values = [f"IF(id = 3, NULL, id + {at}) AS c" for at in range(len(ODD_NAMES))]
    odd = spark.range(0, 6, 1, 2).selectExpr(*values).toDF(*ODD_NAMES)

    def read(pair: Any, named: Any, odd: Any) -> list[Any]:
        shards = [pair[0], pair[1][0], named["cut"], named["whole"]]
        [columns] = odd.iter_torch_batches(batch_size=None, fill=dict.fromkeys(odd.names, 0))
        return [*map(ids, shards), {name: columns[name].tolist() for name in columns}]

    named = {"cut": from_spark(frame, equal="drop"), "whole": from_spark(frame, split=False)}
    ranks = TorchDistributor(2, use_gpu=False, timeout=120)
    found = ranks.run_all(read, [frame, (other,)], named, from_spark(odd, split=False))

    padded, others, cut, whole, columns = zip(*found, strict=True)
    assert list(map(len, padded)) == [4, 4]
    assert sorted({*padded[0], *padded[1]}) == list(range(7))
    assert sorted(others[0] + others[1]) == list(range(100, 104))
    assert sorted(cut[0] + cut[1]) == list(range(6))
    assert list(whole) == [list(range(7))] * 2
    rows = {name: [0 if i == 3 else i + at for i in range(6)] for at, name in enumerate(ODD_NAMES)}
    assert list(columns) == [rows] * 2
    shown = capfd.readouterr().err
    assert re.search(r"pair\[0\]: 7 rows .* 4 for each of 2 ranks; 1 row repeated", shown)
    assert re.search(r"named\['cut'\]: 7 rows .* 3 for each of 2 ranks; 1 row dropped", shown)


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


def test_rows_are_freed_after_a_failed_run(on_executors: TorchDistributor, spark: Any) -> None:
    def die(shard: Any) -> None:
        os.kill(os.getpid(), 9)

    def read_text(rows: Any) -> list[str]:
        return [row["text"] for row in rows.iter_rows()]

    with pytest.raises(WorkerDied):
        on_executors.run(die, spark.range(4))
    with pytest.raises(KeyError) as caught:
        on_executors.run(read_text, spark.range(4).selectExpr("id", "'a' AS body"))
    assert (
        "If 'text' is meant as a column: rows has the columns id, body." in caught.value.__notes__
    )


def test_a_run_is_cancelled_while_spark_computes(
    on_executors: TorchDistributor, spark: Any
) -> None:
    def never_end(batches: Any) -> Any:
        import threading

        threading.Event().wait()
        yield from batches

    tracker = spark.sparkContext.statusTracker()
    frame = spark.range(0, 4, 1, 2).mapInArrow(never_end, "id long")
    future = on_executors.submit(lambda shard: None, frame)
    until(lambda: tracker.getActiveStageIds(), "Spark computes the DataFrame", 60)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(60)
    until(lambda: not tracker.getActiveStageIds(), "Spark's job has ended", 60)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda spark: spark.range(1), ValueError, "df has 1 row, which are too few for 2 ranks"),
    (lambda spark: spark.range(3).selectExpr("id x", "id x"), ValueError, "of the name 'x'"),
    (
        lambda spark: spark.readStream.format("rate").load(),
        ValueError,
        "streaming DataFrame has no end",
    ),
    (lambda spark: spark.newSession().range(3), ValueError, "df belongs to another Spark session"),
    (lambda spark: Holder(spark.range(3)), UnpicklableError, "in a list, tuple or dict among them"),
]


def test_what_is_refused_before_the_start(spark: Any, tmp_path: Path) -> None:
    started = tmp_path / "started"
    ranks = TorchDistributor(2, use_gpu=False)
    for make, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            ranks.run(lambda df: started.touch(), df=make(spark))
    frame = spark.range(4).selectExpr("raise_error(concat('bad row ', id)) AS x")
    with pytest.raises(Exception, match="bad row") as caught:
        ranks.run(lambda df: started.touch(), frame)
    assert not isinstance(caught.value, DistributorError), "it is Spark's"
    assert not started.exists()
