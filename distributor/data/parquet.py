"""Parquet files as training data, which the ranks read themselves: a chunk is a row group."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from math import isnan, nan
from operator import and_
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from distributor.core.files import shown
from distributor.core.text import counted, is_unicode
from distributor.data.dataframes import check_sharing
from distributor.data.epochs import Equal, Layout
from distributor.data.shard import DatasetShard
from distributor.filesystems import Entry, entries, is_local, matches, native, resolve

if TYPE_CHECKING:
    from numpy.typing import NDArray

THREADS = 16  # files whose footers are read at the same time
SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
NULLABLE = ("nullable", "containsNull", "valueContainsNull")  # keys of types in it
VECTOR = "linalg.VectorUDT"  # how the names of Spark's vector types end
# Bytes in memory of a value of Parquet's types of fixed size.
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
# Nanoseconds, pyarrow's default for INT96, do not reach the dates that Spark has.
INT96: Mapping[str, Any] = {"coerce_int96_timestamp_unit": "us"}
# Types that Spark does not have in files, and those with all of their values.
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20),
    pa.null(): pa.int32(),  # as which files store it
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.date64(): pa.date32(),
}
HIDDEN = ("_", ".")  # files and folders whose names begin so contain no data, as in Spark
NULL = "__HIVE_DEFAULT_PARTITION__"  # a partition's name for a null, in Spark
DELTA_LOG = "_delta_log"
# The types of values in folders' names, and how these look: what Spark reads, in its order.
FOLDER_TYPES = {
    r"-?\d+": (pa.int32(), pa.int64()),
    r"-?(\d{1,9}|\d+\.\d*|\.\d+)(E-?\d+)?|NaN|-?Infinity": (pa.float64(),),
    r"\d{4}-\d\d-\d\d": (pa.date32(),),
    r"\d{4}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d)?)?": (pa.timestamp("us"),),
}

PathLike = str | os.PathLike[str]
Partition = Mapping[str, pa.Scalar]  # values in the names of a file's folders, such as ``label=3``


def from_parquet(
    path: PathLike | Sequence[PathLike],
    *,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    equal: Equal = "pad",
    split: bool = True,
) -> DatasetShard:
    """Return this rank's share of the rows of Parquet files, without Spark.

    The ranks read the files themselves, so all of them need access to the files, which may be
    larger than the disks of the cluster. A rank reads one row group at a time, and keeps it in
    memory until it needs another one. Ranks share the rows evenly, whatever the row groups' sizes.

    Call it in the training function, or on the driver and pass what it returns as an argument of
    ``run``. The latter looks at the files once instead of in each rank.

    Parameters
    ----------
    path : str, path, or sequence of them
        Files, folders, and patterns such as ``"data/2024-*/*.parquet"``; or addresses of a file
        system that pyarrow knows, such as ``"s3://bucket/folder"``, in which patterns consist of
        ``*`` and ``**`` only. Folders are searched recursively, without files whose names begin
        with ``_`` or ``.``. Subfolders such as ``label=3``, as Spark writes them with
        ``partitionBy``, become columns.
    columns : sequence of str, optional
        The columns to read, by default all. The columns that are read must be in all files. Their
        types may differ if one of them has all values, such as ``string`` and its dictionaries,
        decimals, times of other units, or a column of nulls.
    filters : pyarrow expression, or list, optional
        Which rows to read, as in `pyarrow.parquet.read_table`: an expression, a list of conditions
        such as ``[("label", "<", 5)]`` that must all hold, or a list of such lists, of which one
        must. Row groups are skipped whose statistics exclude that they contain such rows. To count
        the rows, the columns of the filter are read once when this function is called; without
        filters, only the files' footers are read.
    equal : "pad", "drop" or False, default "pad"
        How all ranks get the same number of rows, as for `from_spark`.
    split : bool, default True
        Whether the ranks share the rows. If not, each rank reads all of them.

    Returns
    -------
    DatasetShard
        The share of this rank, according to ``RANK`` and ``WORLD_SIZE``. Outside of a run, it has
        all rows.

    Raises
    ------
    FileNotFoundError
        If a path names no file.
    TypeError
        If `columns` is a string, or `split` not a bool.
    ValueError
        If a file is not a Parquet file or lacks a column, if types differ between files, if
        `columns` or `filters` name a column that does not exist, if `equal` has another value, or
        if there are no rows or fewer rows than ranks.

    Examples
    --------
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> pq.write_table(pa.table({"x": [0.5, 1.5, 2.5], "label": [0, 1, 0]}), "rows.parquet")
    >>> shard = from_parquet("rows.parquet", filters=[("label", "==", 0)])
    >>> shard.count()
    2
    """
    check_sharing(equal, split)
    return ParquetShard(open_parquet(path, columns, filters), equal, split)


class ParquetShard(DatasetShard):
    """A rank's share of Parquet files. A copy that is unpickled in a rank is that rank's share."""

    def __init__(self, source: ParquetSource, equal: Equal, split: bool) -> None:
        rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        layout = Layout(source.chunk_rows, source.chunk_bytes, equal, split)
        if not layout.num_rows:
            selected = "" if source.expression is None else " that the filters select"
            raise ValueError(f"{source.name} has no rows{selected}.")
        if split and layout.num_rows < num_ranks:
            raise ValueError(
                f"{source.name} has {counted(layout.num_rows, 'row')}, which is less than one for "
                f"each of the {num_ranks} ranks. Use fewer ranks."
            )
        super().__init__(source, layout, rank, num_ranks)
        self.row_groups = source

    def __reduce__(self) -> tuple[Any, ...]:
        layout = self._share.layout
        return type(self), (self.row_groups, layout.equal, layout.split)

    def __copy__(self) -> ParquetShard:
        # Within a rank, a copy has the same epochs and position.
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied


def open_parquet(
    path: PathLike | Sequence[PathLike], columns: Sequence[str] | None = None, filters: Any = None
) -> ParquetSource:
    """Read the footers of Parquet files; with filters, also count the rows that they select."""
    filesystem, found = find_files(path)
    files = [ParquetFile(*each) for each in found]
    first = read_footer(filesystem, (), False, files[0]).schema
    names = _check_columns(columns, first)
    selected = None if columns is None else names
    with ThreadPoolExecutor(THREADS) as threads:
        read = partial(read_footer, filesystem, selected, filters is not None)
        footers = list(threads.map(read, files))
        schema = _common_schema(first, files, footers, selected)
        expression = _expression(filters, schema)
        if expression is not None:
            footers = list(threads.map(partial(_filtered, schema, expression), files, footers))
    row_groups = [
        (number, group) for number, footer in enumerate(footers) for group in footer.row_groups
    ]
    nulls = {name: sum(group.nulls[name] for _, group in row_groups) for name in names}
    types = spark_types_of(first, schema)
    return ParquetSource(
        name=_name(path),
        schema=pa.schema([schema.field(name) for name in names]),
        vectors=frozenset(name for name in names if _is_vector(types.get(name))),
        spark_types=types,
        chunk_rows=np.array([group.rows for _, group in row_groups], np.int64),
        chunk_bytes=np.array([group.bytes for _, group in row_groups], np.int64),
        null_counts={name: int(count) for name, count in nulls.items() if not isnan(count)},
        filesystem=filesystem,
        files=files,
        row_groups=[(number, group.number) for number, group in row_groups],
        file_schema=schema,
        expression=expression,
    )


def _check_columns(columns: Sequence[str] | None, schema: pa.Schema) -> list[str]:
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, but is the string {columns!r}.")
    names = list(schema.names if columns is None else columns)
    if unknown := [name for name in names if name not in schema.names]:
        raise ValueError(
            f"There is no column {unknown[0]!r}, which is in columns={names}. The columns of the "
            f"files are {', '.join(schema.names)}."
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(f"columns must name at least one column, and each once, but is {names}.")
    return names


def _expression(filters: Any, schema: pa.Schema) -> Any:
    if filters is None:
        return None
    try:
        expression = pq.filters_to_expression(filters)
        schema.empty_table().filter(expression)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ValueError(
            f"filters={filters} cannot be applied: {str(error).splitlines()[0]}. The columns of "
            f"the files are {', '.join(schema.names)}."
        ) from error
    return expression


def _name(path: PathLike | Sequence[PathLike]) -> str:
    if isinstance(path, (str, os.PathLike)):
        return shown(path)
    first, *others = path
    return shown(first) + (f" and {counted(len(others), 'other path')}" if others else "")


@dataclass(frozen=True)
class ParquetFile:
    """A file, and the values of the columns that the names of its folders contain."""

    path: str
    partition: Partition

    def fragment(self, filesystem: Any, row_groups: list[int] | None = None) -> Any:
        """Return all of the file, or some row groups, for pyarrow to read."""
        conditions = [
            pc.field(name) == value if value.is_valid else pc.field(name).is_null()
            for name, value in self.partition.items()
        ]
        file = (self.path, filesystem) if is_unicode(self.path) else (self.opened(filesystem),)
        return pads.ParquetFileFormat(**INT96).make_fragment(
            *file,
            partition_expression=reduce(and_, conditions) if conditions else None,
            row_groups=row_groups,
        )

    def opened(self, filesystem: Any) -> Any:
        return filesystem.open_input_file(native(filesystem, self.path))


@dataclass(eq=False)
class ParquetSource:
    """The row groups of Parquet files, as a `Source`. It can be pickled, and is small then."""

    name: str
    schema: pa.Schema
    vectors: frozenset[str]
    spark_types: Mapping[str, Any]  # of columns, as Spark wrote them to the files in JSON
    chunk_rows: NDArray[np.int64]
    chunk_bytes: NDArray[np.int64]
    null_counts: Mapping[str, int] | None
    filesystem: Any
    files: list[ParquetFile]
    row_groups: list[tuple[int, int]]  # of each chunk, the file and the number of the row group
    file_schema: pa.Schema  # all columns of the files
    expression: Any  # which rows are read; None for all
    use_threads: bool = True  # of pyarrow, to read a row group
    _last: tuple[int, pa.Table] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}

    def release(self, chunk: int) -> None:
        """Do nothing: the next row group that is read replaces it."""

    def read(self, chunk: int) -> pa.Table:
        """Read a row group, unless it is the one that was read last."""
        if (last := self._last) is not None and last[0] == chunk:
            return last[1]
        last = self._last = None  # so that only one is in memory
        file, row_group = self.row_groups[chunk]
        table = (
            self.files[file]
            .fragment(self.filesystem, [row_group])
            .to_table(
                schema=self.file_schema,
                columns=self.schema.names,
                filter=self.expression,
                use_threads=self.use_threads,
            )
        )
        self._check_rows(chunk, len(table))
        table = self._converted(table.columns)
        self._last = (chunk, table)
        return table

    def read_parts(self, chunk: int, rows: int) -> Iterator[pa.Table]:
        """Read a row group, so many rows at once, which needs no memory for all of it.

        With a filter, which may need other columns, it is read at once.
        """
        if self.expression is not None:
            yield self.read(chunk)
            return
        number, row_group = self.row_groups[chunk]
        file = self.files[number]
        with file.opened(self.filesystem) as stream:
            reader = pq.ParquetFile(stream, pre_buffer=True, **INT96)
            self._check_rows(chunk, reader.metadata.row_group(row_group).num_rows)
            names = [name for name in self.schema.names if name not in file.partition]
            for batch in reader.iter_batches(rows, [row_group], names, self.use_threads):
                columns = [
                    pa.repeat(file.partition[name], len(batch))
                    if name in file.partition
                    else batch.column(name)
                    for name in self.schema.names
                ]
                yield self._converted(columns)

    def _converted(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Table:
        """Return columns of a file in the types of `schema`."""
        converted = [
            _cast(column, self.file_schema.field(field.name).type, field.type)
            for column, field in zip(columns, self.schema, strict=True)
        ]
        return pa.Table.from_arrays(converted, schema=self.schema)

    def _check_rows(self, chunk: int, rows: int) -> None:
        number, row_group = self.row_groups[chunk]
        if rows != self.chunk_rows[chunk]:
            raise RuntimeError(
                f"{self.files[number].path} has changed since the run began: row group "
                f"{row_group} had {self.chunk_rows[chunk]} rows, and has {rows} now."
            )


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file."""

    number: int
    rows: int  # that are read
    bytes: int  # of these in memory, roughly
    nulls: Mapping[str, float]  # of each column in these rows; NaN if it is not known


@dataclass(frozen=True)
class Footer:
    """What the end of a file says of it."""

    schema: pa.Schema  # with the columns of its folders
    row_groups: list[RowGroup]
    fragment: Any  # the file, if the rows that a filter selects are still to be counted


def read_footer(
    filesystem: Any, names: Collection[str] | None, is_filtered: bool, file: ParquetFile
) -> Footer:
    """Read the footer of a file, of which these columns are read; None for all."""
    fragment = file.fragment(filesystem)
    try:
        schema, metadata = fragment.physical_schema, fragment.metadata
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file.path} cannot be read as a Parquet file: {error}") from error
    stored = (metadata.schema.column(at).physical_type for at in range(metadata.num_columns))
    fields = [
        field.with_type(with_instants(field.type, [*islice(stored, len(leaves(field.type)))]))
        for field in schema
    ]
    columns = [field.name for field in schema for _ in leaves(field.type)]
    fields += [
        pa.field(name, value.type)
        for name, value in file.partition.items()
        if name not in schema.names
    ]
    schema = pa.schema(fields, schema.metadata)
    row_groups = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows = group.num_rows
        size, nulls = _size_and_nulls(group, columns, schema.names if names is None else names)
        nulls |= {name: 0 if value.is_valid else rows for name, value in file.partition.items()}
        row_groups.append(RowGroup(number, rows, size, nulls))
    return Footer(schema, row_groups, fragment if is_filtered else None)


def spark_types_of(first: pa.Schema, schema: pa.Schema) -> dict[str, Any]:
    """Return the types of columns that Spark wrote to the first file, if all files have them."""
    text = (first.metadata or {}).get(SPARK_SCHEMA)
    # Spark reads all of them so that they may be null.
    fields = json.loads(text, object_hook=_nullable)["fields"] if text else []
    return {
        field["name"]: field
        for field in fields
        if field["name"] in first.names
        and schema.field(field["name"]) == first.field(field["name"])
    }


def _nullable(part: dict[str, Any]) -> dict[str, Any]:
    return part | {key: True for key in part if key in NULLABLE}


def _is_vector(field: Any) -> bool:
    """Return whether Spark wrote a column from vectors."""
    kind = field["type"] if field else None
    return isinstance(kind, dict) and str(kind.get("class")).endswith(VECTOR)


def _common_schema(
    first: pa.Schema,
    files: Sequence[ParquetFile],
    footers: Sequence[Footer],
    names: Sequence[str] | None,
) -> pa.Schema:
    """Return the columns of the first file, with types that have the values of all files."""
    kinds = {field.name: field.type for field in first}
    for file, schema in zip(files, (footer.schema for footer in footers), strict=True):
        if schema.equals(first):
            continue
        for name in names or [*first.names, *(set(schema.names) - set(first.names))]:
            here = schema.field(name).type if name in schema.names else None
            there = kinds.get(name)
            common = common_type(here, there) if here and there else None
            if common is None:
                raise ValueError(
                    f"The files have different columns: {name!r} is {here or 'missing'} in "
                    f"{file.path}, and {there or 'missing'} in the first file. Select columns that "
                    "are the same in all files by columns=[...]."
                )
            kinds[name] = common
    return pa.schema([field.with_type(kinds[field.name]) for field in first])


def _filtered(schema: pa.Schema, expression: Any, file: ParquetFile, footer: Footer) -> Footer:
    """Return the row groups with rows that a filter may select, and how many these are."""
    here = [schema.field(name) for name in schema.names if name in footer.schema.names]
    try:
        pa.schema(here).empty_table().filter(expression)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"The filters cannot be applied to {file.path}: {reason}.") from error
    row_groups = []
    for part in footer.fragment.split_by_row_group(filter=expression, schema=schema):
        group = footer.row_groups[part.row_groups[0].id]
        scanner = part.scanner(columns=[], filter=expression, schema=schema)
        # pyarrow counts the file's rows if the folder's name alone decides.
        rows = min(scanner.count_rows(), group.rows)
        nulls = {
            name: rows if count == group.rows else nan if count else 0
            for name, count in group.nulls.items()
        }
        size = group.bytes * rows // max(group.rows, 1)
        row_groups.append(replace(group, rows=rows, bytes=size, nulls=nulls))
    return Footer(schema, row_groups, None)


def _cast(column: Any, common: pa.DataType, wanted: pa.DataType) -> Any:
    """Convert a column of a file to the type of all files, and this to another one."""
    if column.type != common:
        column = column.cast(common)
    if column.type == wanted:
        return column
    if pa.types.is_timestamp(common) and common.tz is None and wanted.tz is not None:
        return pc.assume_timezone(column, wanted.tz, ambiguous="earliest", nonexistent="latest")
    return column.cast(wanted, safe=False)  # nanoseconds are truncated


def _size_and_nulls(
    row_group: Any, columns: Sequence[str], names: Collection[str]
) -> tuple[int, dict[str, float]]:
    size = 0
    nulls: dict[str, float] = dict.fromkeys(names, 0)
    for index, name in enumerate(columns):
        if name in nulls:
            column = row_group.column(index)
            width = WIDTHS.get(column.physical_type, 0)
            size += max(column.num_values * width, column.total_uncompressed_size)
            nulls[name] += _null_count(column, name)
    return size, nulls


def _null_count(column: Any, name: str) -> float:
    statistics = column.statistics
    if statistics is None or not statistics.has_null_count:
        return nan
    is_nested = column.path_in_schema != name  # empty lists count as nulls there
    return nan if is_nested and statistics.null_count else int(statistics.null_count)


# Files


def find_files(
    path: PathLike | Sequence[PathLike],
) -> tuple[pafs.FileSystem, list[tuple[str, Partition]]]:
    """Return the data files that paths, folders and patterns name, with their partitions."""
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths:
        raise FileNotFoundError("No paths were passed: the list is empty.")
    (filesystem, _), *others = resolved = [_resolved(each) for each in paths]
    if any(other != filesystem for other, _ in others):
        names = ", ".join(map(shown, paths))
        raise ValueError(f"The paths must be of one file system, but are {names}.")
    folders: dict[str, list[str]] = {}
    reals: dict[str, str] = {}  # by which path each file is read, whatever links lead to it
    for written, (_, inside) in zip(paths, resolved, strict=True):
        found = [
            file for match in matches(filesystem, inside) for file in _files(filesystem, match)
        ]
        if not found:
            raise FileNotFoundError(f"No data files were found at {shown(written)!r}.")
        for folder, file in found:
            real = os.path.realpath(file) if is_local(filesystem) else file
            if real not in reals:
                folders.setdefault(folder, []).append(file)
            known = reals.setdefault(real, file)
            if _named_values(known) != _named_values(file):
                raise ValueError(
                    f"{shown(known)} and {shown(file)} are one file, because of a link, but their "
                    "folders' names have other values. Remove the link."
                )
    return filesystem, [
        found for folder, files in folders.items() for found in _with_partitions(folder, files)
    ]


def _resolved(path: PathLike) -> tuple[pafs.FileSystem, str]:
    filesystem, inside = resolve(path)
    # Without "..", after folders that other nodes may not have.
    return filesystem, os.path.normpath(inside) if is_local(filesystem) else inside


def _with_partitions(folder: str, paths: Sequence[str]) -> Iterator[tuple[str, Partition]]:
    """Yield each path with the values in the names of its subfolders."""
    texts = [_folder_values(folder, path[len(folder) :]) for path in paths]
    names = {name for each in texts for name in each}
    types = {name: _type_of([each.get(name) for each in texts]) for name in names}
    for path, each in zip(paths, texts, strict=True):
        yield (
            path,
            {name: pa.scalar(text, pa.string()).cast(types[name]) for name, text in each.items()},
        )


def _folder_values(folder: str, path: str) -> dict[str, str | None]:
    parts = [part.partition("=") for part in path.split("/")[:-1]]
    if unreadable := [value for _, equals, value in parts if equals and not is_unicode(value)]:
        raise ValueError(
            f"{folder}{path} is in a folder whose name ends in ={unreadable[0]}. This is not "
            "valid Unicode, so it cannot be a column's value. Rename the folder."
        )
    return {
        unquote(name): None if value == NULL else unquote(value)
        for name, equals, value in parts
        if equals
    }


def _named_values(path: str) -> list[str]:
    return [part for part in os.path.dirname(path).split("/") if "=" in part]


def _type_of(texts: Sequence[str | None]) -> pa.DataType:
    """Return the type of a column whose values are in names of folders, which is Spark's."""
    known = [text for text in texts if text is not None]
    for pattern, types in FOLDER_TYPES.items():
        if known and all(re.fullmatch(pattern, text, re.ASCII) for text in known):
            for type in types:
                with contextlib.suppress(pa.ArrowInvalid):
                    pa.array(known).cast(type)
                    return type
    return pa.string()


def _files(filesystem: pafs.FileSystem, match: Entry) -> list[tuple[str, str]]:
    """Return pairs of folder and file for what a path names."""
    if match.is_file:
        return [(os.path.dirname(match.path), match.path)]
    found = entries(filesystem, match.path, allow_not_found=True)
    if any(os.path.basename(entry.path) == DELTA_LOG for entry in found):
        raise ValueError(
            f"{match.path} is a Delta table, whose folder also contains files of earlier versions. "
            'Read it with Spark, spark.read.format("delta").load(path), and pass the DataFrame.'
        )
    return sorted(
        (match.path, entry.path)
        for entry in found
        if entry.is_file and not _is_hidden(entry.path[len(match.path) :])
    )


def _is_hidden(path: str) -> bool:
    # Folders of partitions may begin so: _year=2024.
    return any(part.startswith(HIDDEN) and "=" not in part for part in path.split("/"))


# Types


def rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with other leaves. Its fields may be null, and its arrays have any length."""
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name != "arrow.uuid":
        return rebuilt(kind.storage_type, change)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, rebuilt(field.type, change)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(rebuilt(kind.key_type, change), rebuilt(kind.item_type, change))
    if not hasattr(kind, "value_type"):
        return change(kind)
    value = rebuilt(kind.value_type, change)
    if pa.types.is_dictionary(kind):
        return value
    return kind if "_view<" in str(kind) else pa.list_(value)  # pyarrow loses what a view has


def leaves(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types without parts that a type consists of: a file has a column for each."""
    found: list[pa.DataType] = []

    def add(leaf: pa.DataType) -> pa.DataType:
        found.append(leaf)
        return leaf

    rebuilt(kind, add)
    return found


def with_instants(kind: pa.DataType, stored: Sequence[str]) -> pa.DataType:
    """Return the type of a column that a file stores as these types; INT96 as Spark reads it.

    For pyarrow, it is a time without a time zone.
    """
    if "INT96" not in stored:
        return kind
    each = iter(stored)
    return rebuilt(kind, lambda leaf: pa.timestamp("us", "UTC") if next(each) == "INT96" else leaf)


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that has all values of two types, as they are; None if there is none."""
    if one == other:
        return one
    kinds = [rebuilt(kind, _mergeable) for kind in (one, other)]
    try:
        schemas = [pa.schema([("", kind)]) for kind in kinds]
        found = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowException, TypeError):  # the latter before pyarrow 14
        return None
    return found if all(_is_alike(kind, found) for kind in kinds) else None


def spark_type(kind: pa.DataType) -> pa.DataType:
    """Return what Spark reads a type as; a type that Spark does not have remains as it is."""
    return rebuilt(kind, _of_spark)


def _mergeable(leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(leaf) and leaf.tz is not None:
        return pa.timestamp(leaf.unit, "UTC")
    return _without_view(leaf)


def _is_alike(kind: pa.DataType, found: pa.DataType) -> bool:
    """Return whether integers do not become floats, nor texts bytes."""
    pairs = list(zip(leaves(kind), leaves(found), strict=False))
    return pa.types.is_null(kind) or (
        len(leaves(kind)) == len(leaves(found))
        and all(pa.types.is_null(one) or _marks(one) == _marks(other) for one, other in pairs)
    )


def _marks(leaf: pa.DataType) -> tuple[bool, bool]:
    return pa.types.is_floating(leaf), "string" in str(leaf)


def _without_view(leaf: pa.DataType) -> pa.DataType:
    return getattr(pa, str(leaf).removesuffix("_view"))() if str(leaf).endswith("_view") else leaf


def _of_spark(leaf: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(leaf):
        return pa.timestamp("us", None if leaf.tz is None else "UTC")
    if pa.types.is_fixed_size_binary(leaf):
        return pa.binary()
    if pa.types.is_duration(leaf):
        return pa.int64()
    if pa.types.is_decimal(leaf) and leaf.precision <= 38:
        return pa.decimal128(leaf.precision, leaf.scale)
    return _WIDER.get(leaf, _without_view(leaf))
