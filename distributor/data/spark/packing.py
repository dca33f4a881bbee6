"""Packs the rows of a Spark task into chunks, and writes a node's chunks into a file."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from distributor.core.resources import format_bytes
from distributor.data.spark.chunk_file import ChunkFileWriter, DatasetSpec
from distributor.errors import ExecutorNotReady

INDEX_COLUMNS = (
    "part int, number int, num_rows long, num_bytes long, checksum long, nulls string, "
    "schema binary"
)
"""What describes a chunk: its task and its number there, its size, and the nulls in each column.

The nulls are a list in JSON. The columns' names here are not those of the DataFrame.
"""
CHUNK_COLUMNS = f"{INDEX_COLUMNS}, message binary"


def pack(argument: bytes, batches: Iterator[pa.RecordBatch], _: str) -> Iterator[pa.RecordBatch]:
    """Pack a partition's rows into chunks; a task of ``mapInArrow``.

    Parameters
    ----------
    argument : bytes
        The size of a chunk in bytes, as JSON.
    batches : iterator of RecordBatch
        The rows.

    Yields
    ------
    RecordBatch
        A row for each chunk, with `CHUNK_COLUMNS`.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "it runs in a task"
    part = context.partitionId()
    for number, rows in enumerate(_grouped(batches, json.loads(argument))):
        message = rows.serialize()
        schema = rows.schema.serialize().to_pybytes()
        nulls = [column.null_count for column in rows.columns]
        yield pa.record_batch(
            [
                pa.array([part], pa.int32()),
                pa.array([number], pa.int32()),
                pa.array([rows.num_rows], pa.int64()),
                pa.array([message.size], pa.int64()),
                pa.array([zlib.crc32(message)], pa.int64()),
                pa.array([json.dumps(nulls)], pa.string()),
                pa.array([schema if number == 0 else None], pa.binary()),
                _binary(message),
            ],
            [column.split()[0] for column in CHUNK_COLUMNS.split(", ")],
        )


def _grouped(batches: Iterator[pa.RecordBatch], chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """Combine and split batches so that each has about `chunk_bytes`."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for part in _split(batch, chunk_bytes):
            waiting.append(part)
            size += part.nbytes
            if size >= chunk_bytes:
                yield _combined(waiting)
                waiting, size = [], 0
    if size or waiting:
        yield _combined(waiting)


def _split(batch: pa.RecordBatch, chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
    step = max(1, chunk_bytes // row_bytes)
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _combined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    [combined] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return combined


def _binary(message: pa.Buffer) -> pa.Array:
    """Return an array of one binary value, without a copy."""
    offsets = pa.py_buffer(np.array([0, message.size], dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), 1, [None, offsets, message])


def write_chunks(
    batches: Iterator[pa.RecordBatch],
    datasets: Sequence[DatasetSpec],
    ranks_per_node: int,
    folder: str,
) -> BinaryIO:
    """Write the chunks that Spark passes to a node into a file without a name.

    Parameters
    ----------
    batches : iterator of RecordBatch
        The columns ``node`` (of the node's share), ``dataset``, ``chunk`` and ``message``.
    datasets : sequence of DatasetSpec
        The datasets.
    ranks_per_node : int
        The number of ranks on each node.
    folder : str
        The folder of the file.

    Raises
    ------
    ExecutorNotReady
        If the disk is full.
    DistributorError
        If Spark has computed other rows than before.
    """
    file = tempfile.TemporaryFile(dir=folder)
    writer = ChunkFileWriter(file, datasets)
    node = 0
    try:
        for batch in batches:
            nodes, numbers, chunks, messages = batch.columns
            node = nodes[0].as_py()
            places = zip(numbers.to_pylist(), chunks.to_pylist(), messages, strict=True)
            for dataset, chunk, message in places:
                writer.add(dataset, chunk, message.as_buffer())
        writer.finish(node * ranks_per_node)
    except OSError as error:
        size = format_bytes(file.tell())
        raise ExecutorNotReady(
            f"The rows for a node's ranks cannot be written to {folder} ({error}) after {size}. "
            "Free space there, or set spark.local.dir to a larger disk."
        ) from error
    return file
