"""Which chunks each node needs, and the DataFrame with a partition for each node."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distributor.data.chunk_file import DatasetSpec
from distributor.data.epochs import Epoch, Order
from distributor.launchers.spark.datasets.chunked_dataset import ChunkedDataset
from distributor.spark.session import Session

NODE_COLUMNS = ("node", "dataset", "chunk", "message")
"""The columns of `distributed`, as the tasks of the nodes read them."""


def chunks_of_nodes(
    spec: DatasetSpec, num_nodes: int, ranks_per_node: int, epoch: Epoch | None
) -> list[list[int]]:
    """Return the chunks that each node needs of a dataset."""
    num_ranks = num_nodes * ranks_per_node
    epochs = [Epoch(0, Order()), *([epoch] if epoch else [])]
    return [
        sorted(
            {
                int(chunk)
                for share in range(node * ranks_per_node, (node + 1) * ranks_per_node)
                for each in epochs
                for span in spec.layout.plan(each, share, num_ranks)
                for chunk in np.unique(span.pieces[:, 0])
            }
        )
        for node in range(num_nodes)
    ]


def distributed(
    datasets: Sequence[ChunkedDataset],
    num_nodes: int,
    ranks_per_node: int,
    epochs: Mapping[str, Epoch],
) -> Any:
    """Return a DataFrame with a partition for each node, which contains the node's chunks."""
    from pyspark.sql import functions

    session = Session(datasets[0].frame.sparkSession)
    keys = _partition_keys(session.spark, num_nodes)
    frames = []
    for number, dataset in enumerate(datasets):
        nodes = chunks_of_nodes(
            dataset.spec, num_nodes, ranks_per_node, epochs.get(dataset.spec.name)
        )
        targets = session.data_frame(
            list(_targets(nodes, number, dataset.places, keys)),
            "part int, number int, key long, node int, dataset int, chunk int",
        )
        frames.append(dataset.frame.join(functions.broadcast(targets), ["part", "number"]))
    frame = functools.reduce(lambda one, other: one.unionByName(other), frames)
    return frame.repartition(num_nodes, "key").select(*NODE_COLUMNS)


def _targets(
    nodes: list[list[int]], dataset: int, places: Sequence[tuple[int, int]], keys: list[int]
) -> Iterator[tuple[int, ...]]:
    for node, chunks in enumerate(nodes):
        for chunk in chunks:
            yield (*places[chunk], keys[node], node, dataset, chunk)


_keys: dict[int, list[int]] = {}
"""What Spark returned earlier, by the number of partitions: its hash function never changes."""


def _partition_keys(spark: Any, count: int) -> list[int]:
    """Return a key for each partition, such that Spark's hash of the key is that partition."""
    if count not in _keys:
        found: dict[int, int] = {}
        size = 16 * count
        while len(found) < count:
            hashed = spark.range(size).selectExpr("id", f"pmod(hash(id), {count}) AS part")
            for row in hashed.collect():
                found.setdefault(row.part, row.id)
            size *= 2
        _keys[count] = [found[part] for part in range(count)]
    return _keys[count]
