"""What the footers of Parquet files say about them: their columns, row groups, sizes and nulls."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from distributor.data.parquet.source import ParquetFile

SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
VECTOR = "linalg.VectorUDT"
"""How the names of Spark's vector types end."""
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
"""Bytes in memory of a value of Parquet's types of fixed size."""


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file.

    Parameters
    ----------
    number : int
        Its number in the file.
    rows, bytes : int
        The rows that are read, and roughly their size in memory.
    nulls : dict of str to int or None
        The number of nulls of each column in these rows; None if it is not known.
    """

    number: int
    rows: int
    bytes: int
    nulls: dict[str, int | None]


@dataclass(frozen=True)
class Query:
    """What is read of files.

    Parameters
    ----------
    schema : pyarrow.Schema
        The columns of the first file, which the others must have too.
    names : list of str, or None
        The columns that are read; None for all.
    expression : pyarrow.compute.Expression or None
        Which rows are read.
    """

    schema: pa.Schema
    names: Sequence[str] | None
    expression: Any


def schema_of(filesystem: Any, file: ParquetFile) -> pa.Schema:
    """Return the columns of a file and of its folders.

    Raises
    ------
    ValueError
        If it is not a Parquet file.
    """
    schema, _ = _footer(file.path, file.fragment(filesystem))
    return _with_partition(schema, file)


def read_footer(filesystem: Any, query: Query, file: ParquetFile) -> list[RowGroup]:
    """Return the row groups of a file; with a filter, those with rows that it may select.

    Raises
    ------
    ValueError
        If it is not a Parquet file, or its columns are not those of the first file.
    """
    fragment = file.fragment(filesystem)
    schema, metadata = _footer(file.path, fragment)
    _check_schema(file.path, _with_partition(schema, file), query)
    leaves = [field.name for field in schema for _ in range(_num_leaves(field.type))]
    names = set(query.schema.names if query.names is None else query.names)
    row_groups = []
    for number, rows in _num_rows(fragment, metadata, query):
        size, nulls = _size_and_nulls(metadata.row_group(number), leaves, names)
        if query.expression is not None:  # which may select none of them
            size = size * rows // max(metadata.row_group(number).num_rows, 1)
            nulls = {name: None if count else count for name, count in nulls.items()}
        nulls |= {name: 0 if value.is_valid else rows for name, value in file.partition.items()}
        row_groups.append(RowGroup(number, rows, size, nulls))
    return row_groups


def vectors_of(schema: pa.Schema) -> frozenset[str]:
    """Return the columns of a file that Spark wrote from vectors."""
    text = (schema.metadata or {}).get(SPARK_SCHEMA)
    fields = json.loads(text)["fields"] if text else []
    return frozenset(
        field["name"]
        for field in fields
        if isinstance(field["type"], dict) and str(field["type"].get("class")).endswith(VECTOR)
    )


def _footer(path: str, fragment: Any) -> tuple[pa.Schema, Any]:
    try:
        return fragment.physical_schema, fragment.metadata
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as a Parquet file: {error}") from error


def _with_partition(schema: pa.Schema, file: ParquetFile) -> pa.Schema:
    for name, value in file.partition.items():
        if name not in schema.names:
            schema = schema.append(pa.field(name, value.type))
    return schema


def _check_schema(path: str, schema: pa.Schema, query: Query) -> None:
    expected = query.schema
    names = query.names or [*expected.names, *(set(schema.names) - set(expected.names))]
    for name in names:
        here, there = (
            found.field(name).type if name in found.names else None for found in (schema, expected)
        )
        if here != there:
            raise ValueError(
                f"The files have different columns: {name!r} is {here or 'missing'} in {path}, and "
                f"{there or 'missing'} in the first file. Select columns that are the same in all "
                "files by columns=[...]."
            )
    if query.expression is not None:
        try:
            schema.empty_table().filter(query.expression)
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"The filters cannot be applied to {path}: {reason}.") from error


def _num_leaves(type: pa.DataType) -> int:
    """Return the number of Parquet's columns that a column consists of."""
    if isinstance(type, pa.BaseExtensionType):
        return _num_leaves(type.storage_type)
    if pa.types.is_struct(type):
        return sum(_num_leaves(field.type) for field in type)
    if pa.types.is_map(type):
        return _num_leaves(type.key_type) + _num_leaves(type.item_type)
    return _num_leaves(type.value_type) if hasattr(type, "value_type") else 1


def _num_rows(fragment: Any, metadata: Any, query: Query) -> Iterator[tuple[int, int]]:
    """Return numbers of row groups and of the rows that are read of them."""
    if query.expression is None:
        for number in range(metadata.num_row_groups):
            yield number, metadata.row_group(number).num_rows
        return
    for group in fragment.split_by_row_group(filter=query.expression, schema=query.schema):
        scanner = group.scanner(columns=[], filter=query.expression, schema=query.schema)
        yield group.row_groups[0].id, scanner.count_rows()


def _size_and_nulls(
    metadata: Any, leaves: list[str], names: Collection[str]
) -> tuple[int, dict[str, int | None]]:
    size = 0
    nulls: dict[str, int | None] = {}
    for index, name in enumerate(leaves):
        if name in names:
            column = metadata.column(index)
            width = WIDTHS.get(column.physical_type, 0)
            size += max(column.num_values * width, column.total_uncompressed_size)
            count, before = _null_count(column, name), nulls.get(name, 0)
            nulls[name] = None if count is None or before is None else before + count
    return size, nulls


def _null_count(column: Any, name: str) -> int | None:
    statistics = column.statistics
    if statistics is None or not statistics.has_null_count:
        return None
    is_nested = column.path_in_schema != name  # empty lists count as nulls there
    return None if is_nested and statistics.null_count else int(statistics.null_count)
