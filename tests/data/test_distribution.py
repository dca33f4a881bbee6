"""Spark brings each row to the node whose rank reads it, also after a kill in mid-epoch."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from distributor.control.cancellation import Cancellation
from distributor.data import from_spark
from distributor.data.batches import converted
from distributor.data.chunk_file import ChunkSource, write_chunks
from distributor.data.epochs import Epoch, Order
from distributor.data.formats import table_format
from distributor.data.source import Equal
from distributor.launchers.spark.datasets import chunked_dataset
from distributor.launchers.spark.datasets.collection import Datasets
from distributor.launchers.spark.datasets.distribution import NODE_COLUMNS
from distributor.spark.call_site import CallSite

pytestmark = pytest.mark.spark

NODES = st.tuples(st.integers(1, 3), st.integers(1, 2))
"""The nodes of an attempt, and the ranks of each."""
NODE_SCHEMA = pa.schema(
    [("node", pa.int32()), ("dataset", pa.int32()), ("chunk", pa.int32()), ("message", pa.binary())]
)
BATCH = 5
CASES = {
    "rows": st.integers(6, 200),
    "partitions": st.integers(1, 7),
    "attempts": st.tuples(NODES, st.integers(0, 8), NODES),
    "equal": st.sampled_from([False, "drop", "pad"]),
    "shuffle": st.booleans(),
}
SETTINGS = settings(
    phases=[Phase.generate],  # a smaller example would take minutes to find
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def nodes_of(datasets: Datasets, nodes: tuple[int, int]) -> list[list[Any]]:
    """Return the rows that Spark brings to each node: a partition for each, in any order."""
    from pyspark.sql.functions import spark_partition_id

    found: dict[int, list[Any]] = {}
    for row in datasets.frame(*nodes).withColumn("partition", spark_partition_id()).collect():
        found.setdefault(row.partition, []).append(row)
    assert all(len({row.node for row in rows}) == 1 for rows in found.values())
    return list(found.values())


def read(
    datasets: Datasets, nodes: tuple[int, int], epoch: Epoch, batches: int
) -> dict[int, list[int]]:
    """Return the first batches that each rank reads of an epoch."""
    ranks: dict[int, list[int]] = {}
    for rows in nodes_of(datasets, nodes):
        table = pa.table(
            {name: [row[name] for row in rows] for name in NODE_COLUMNS}, schema=NODE_SCHEMA
        )
        chunks = iter(table.to_batches())
        with write_chunks(chunks, datasets.specs, nodes[1], tempfile.gettempdir()) as file:
            source = ChunkSource(f"/proc/{os.getpid()}/fd/{file.fileno()}", 0)
            layout, first = datasets.specs[0].layout, rows[0].node * nodes[1]
            for rank in range(first, first + nodes[1]):
                spans = layout.plan(epoch, rank, nodes[0] * nodes[1])
                form, size = table_format("numpy", frozenset()), BATCH
                parts = list(converted(source, spans, form, size, drop_last=False))[:batches]
                ranks[rank] = [n for part in parts for n in part.value["id"].tolist()]
    return ranks


def check(
    spark: Any,
    rows: int,
    partitions: int,
    attempts: tuple[tuple[int, int], int, tuple[int, int]],
    equal: Equal,
    shuffle: bool,
) -> None:
    before, batches, after = attempts
    epoch, positions = Epoch(0, Order(shuffle=shuffle, seed=5)), {}
    frame = spark.range(0, rows, 1, partitions)
    dataset = replace(from_spark(frame, equal=equal), name="rows")
    datasets = Datasets([dataset], lambda: positions)
    with datasets.opened("test", CallSite.of_caller("test"), None, Cancellation()):
        earlier = read(datasets, before, epoch, batches)
        rest = epoch.after(len(earlier), batches * BATCH)
        positions["rows"] = {"name": "rows", "rows": rows, **rest.to_position()}
        later = read(datasets, after, rest, rows)
    shares = list(later.values())
    assert sorted(later) == list(range(len(shares)))
    counts = Counter(chain(*earlier.values(), *shares))
    difference = max(map(len, shares)) - min(map(len, shares))
    if equal is False:
        assert counts == dict.fromkeys(range(rows), 1)
        assert difference <= 1
    elif equal == "drop":
        assert set(counts.values()) <= {1}
        assert rows - len(counts) < len(earlier) + len(shares)
        assert difference == 0
    else:
        assert set(counts) == set(range(rows))
        assert counts.total() - rows < len(earlier) + len(shares)
        assert difference == 0


@settings(SETTINGS, max_examples=2)
@given(**CASES)
def test_each_row_is_read_once_before_and_after_a_kill(
    spark: Any, monkeypatch: pytest.MonkeyPatch, **case: Any
) -> None:
    monkeypatch.setattr(chunked_dataset, "CHUNK_BYTES", 128)
    check(spark, **case)
