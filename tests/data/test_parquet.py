"""Parquet files as training data: which files, columns and rows the ranks read."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from distributor import TorchDistributor
from distributor.data.parquet import ParquetSource, from_parquet, open_parquet

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes columns to a file: ``write("part.parquet", x=[1, 2])``."""

    def write_columns(name: str, row_group_size: int = 4, **columns: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
        return path

    return write_columns


def table_of(source: ParquetSource) -> pa.Table:
    chunks = [source.read(chunk) for chunk in range(len(source.chunk_rows))]
    assert [len(chunk) for chunk in chunks] == source.chunk_rows.tolist()
    return pa.concat_tables([*chunks, source.schema.empty_table()])


def values(source: ParquetSource, name: str = "x") -> list[Any]:
    found: list[Any] = table_of(source)[name].to_pylist()
    return found


def test_files_are_found_by_paths_folders_and_patterns(write: Write, tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a/1.parquet", "a/sub/3.parquet", "b/_metadata", "a/_tmp/4", "[c]"):
        write(name, x=[name])
    (tmp_path / "a" / ".hidden").write_text("not Parquet")
    pattern = str(tmp_path / "[ab]" / "*.parquet")
    for paths, expected in (
        (tmp_path, ["[c]", "a/1.parquet", "a/sub/3.parquet", "b/2.parquet"]),
        (pattern, ["a/1.parquet", "b/2.parquet"]),
        (f"file://{tmp_path}/b", ["b/2.parquet"]),
        (f"{tmp_path}/**/?.parquet", ["a/1.parquet", "a/sub/3.parquet", "b/2.parquet"]),
        (tmp_path / "[c]", ["[c]"]),
        ([tmp_path / "b", pattern], ["b/2.parquet", "a/1.parquet"]),
    ):
        assert values(open_parquet(paths)) == expected


def test_paths_that_cannot_be_read_are_errors(write: Write, tmp_path: Path) -> None:
    write("folder/_SUCCESS", x=[1])
    for path in (tmp_path / "folder", tmp_path / "absent", tmp_path / "*.parquet"):
        with pytest.raises(FileNotFoundError) as error:
            from_parquet(path)
        assert repr(str(path)) in str(error.value)
    with pytest.raises(ValueError, match=r"but are s3://bucket\?region=x, /tmp"):  # no credentials
        from_parquet(["s3://key:secret@bucket?region=x", "/tmp"])
    write("delta/part.parquet", x=[1])
    (tmp_path / "delta" / "_delta_log").mkdir()
    with pytest.raises(ValueError, match=r"Delta table.*Read it with Spark"):
        from_parquet(tmp_path / "delta")


def test_folders_of_partitions_are_columns(write: Write, tmp_path: Path) -> None:
    for label in ("1", "2", "__HIVE_DEFAULT_PARTITION__"):
        write(f"table/label={label}/part.parquet", row_group_size=1, x=[1, 2])
    source = open_parquet(tmp_path / "table", columns=["label", "x"])
    assert source.schema == pa.schema([("label", pa.int32()), ("x", pa.int64())])
    assert values(source, "label") == [1, 1, 2, 2, None, None]
    assert source.null_counts == {"label": 2, "x": 0}
    selected = pickle.loads(pickle.dumps(open_parquet(tmp_path, filters=[("label", "=", 2)])))
    assert table_of(selected).to_pydict() == {"x": [1, 2], "label": [2, 2]}


def test_links_do_not_repeat_rows(write: Write, tmp_path: Path) -> None:
    write("rows/a/1.parquet", x=[1])
    write("rows/a/deep/2.parquet", x=[2])
    write("rows/z/3.parquet", x=[3])
    for link, target in (
        ("rows/loop", "."),
        ("rows/a/deep/far", "../../.."),
        ("rows/a/1-again.parquet", "1.parquet"),
        ("rows/a/nowhere", "nowhere"),
        ("linked", "rows"),
    ):
        (tmp_path / link).symlink_to(target)
        for path in ("rows", "rows/*", "rows/**/*.parquet", "rows/a/.."):
            assert sorted(values(open_parquet(tmp_path / path))) == [1, 2, 3]
    assert sorted(values(open_parquet([tmp_path / "linked", tmp_path / "rows"]))) == [1, 2, 3]
    write("label=1/part.parquet", x=["c"])
    (tmp_path / "label=2").symlink_to("label=1")
    with pytest.raises(ValueError, match=r"label=1.* and .*label=2.* are one file, because of a l"):
        open_parquet(tmp_path)


def test_a_row_group_is_read_in_parts(write: Write, tmp_path: Path) -> None:
    """As `predict` does, which needs no more memory for large row groups."""
    rows = {"x": range(25), "a": [{"b": i} for i in range(25)], "a.b": [[i] for i in range(25)]}
    write("table/label=7/part.parquet", row_group_size=20, **rows)
    for columns in (None, ["label", "a"], ["a.b", "x"], ["label"]):
        source = open_parquet(tmp_path / "table", columns=columns)
        parts = [list(source.read_parts(chunk, 8)) for chunk in range(2)]
        assert [[len(part) for part in each] for each in parts] == [[8, 8, 4], [5]]
        assert pa.concat_tables(itertools.chain(*parts)) == table_of(source)
    filtered = open_parquet(tmp_path / "table", columns=["x"], filters=[("label", "=", 7)])
    assert [part["x"].to_pylist() for part in filtered.read_parts(1, 8)] == [[*range(20, 25)]]
    write("table/label=7/part.parquet", row_group_size=9, **rows)
    with pytest.raises(RuntimeError, match="row group 1 had 5 rows, and has 9 now"):
        next(source.read_parts(1, 8))


def test_columns_and_rows_are_selected(write: Write) -> None:
    path = write("part.parquet", x=range(12), y=[i % 2 for i in range(12)], s=["s"] * 12)
    source = open_parquet(path, columns=["s", "x"])
    assert source.schema.names == table_of(source).column_names == ["s", "x"]
    source = open_parquet(path, columns=["x"], filters=[("x", ">=", 6), ("y", "==", 0)])
    assert source.chunk_rows.tolist() == [1, 2], "one row group is not read"
    assert values(source) == [6, 8, 10]
    for filters, expected in (
        ([[("x", "<", 2)], [("x", ">", 10)]], [0, 1, 11]),
        ((pc.field("x") < 2) | (pc.field("x") == 11), [0, 1, 11]),
        (pc.field("x") > 99, []),
    ):
        assert values(open_parquet(path, filters=filters)) == expected
    with pytest.raises(ValueError, match=r"no column 'w'.*columns of the files are x, y, s"):
        open_parquet(path, columns=["x", "w"])
    for bad in ([("w", ">", 1)], pc.field("w") > 1, [("s", ">", 1)], "x > 1"):
        with pytest.raises(ValueError, match=r"filters=.* cannot be applied: .*columns.* are x, y"):
            from_parquet(path, filters=bad)


def test_files_with_other_columns_are_errors(write: Write, tmp_path: Path) -> None:
    write("1.parquet", x=[1], y=[1])
    path = write("2.parquet", y=[2], x=[2])
    assert table_of(open_parquet(tmp_path)).to_pydict() == {"x": [1, 2], "y": [1, 2]}
    for others, difference in (
        ({"x": [1.5], "y": [2]}, "'x' is double in {path}, and int64 in the first file"),
        ({"x": [1]}, "'y' is missing in {path}"),
        ({"x": [1], "y": [2], "z": [3]}, "'z' is int64 in {path}, and missing in the first"),
    ):
        write(path.name, **others)
        with pytest.raises(ValueError, match="different columns") as error:
            from_parquet(tmp_path)
        assert difference.format(path=path) in str(error.value)
    assert values(open_parquet(tmp_path, columns=["x"])) == [1, 1]
    path.write_text("PAR1, but not Parquet")
    with pytest.raises(ValueError, match=f"{path} cannot be read as a Parquet file"):
        from_parquet(tmp_path)


TEXTS = pa.dictionary(pa.int32(), pa.string())
SAME = [  # values that files may keep differently, and the common type
    (pa.array(["x"]), pa.array(["y"], TEXTS), pa.string()),
    (pa.array([["x"]], pa.list_(TEXTS)), pa.array([["y"]]), pa.list_(pa.string())),
    (pa.array([1], pa.int32()), pa.array([2], pa.int64()), pa.int64()),
    (
        pa.array([Decimal("1.5")], pa.decimal128(10, 2)),
        pa.array([Decimal("2.5")], pa.decimal128(12, 2)),
        pa.decimal128(12, 2),
    ),
    (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("ms")), pa.timestamp("us")),
    (pa.array([1]), pa.array(["x"]), None),
    (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("us", "UTC")), None),
    (pa.array([{"a": 1}]), pa.array([{"a": 1, "b": 2}]), None),
]


@pytest.mark.parametrize(
    ("one", "other", "common"), SAME, ids=lambda value: str(getattr(value, "type", value))
)
@pytest.mark.parametrize("order", [1, -1])
def test_files_may_keep_the_same_values_differently(
    write: Write, tmp_path: Path, one: Any, other: Any, common: Any, order: int
) -> None:
    arrays = [one, other][::order]
    for number, array in enumerate(arrays):
        write(f"{number}.parquet", x=array)
    if common is None:
        with pytest.raises(ValueError, match=r"different columns: 'x' is .* in the first file"):
            open_parquet(tmp_path)
        return
    source = open_parquet(tmp_path)
    assert source.schema.field("x").type == common
    expected = [value for array in arrays for value in array.cast(common).to_pylist()]
    assert values(source) == expected
    parts = [part for chunk in range(2) for part in source.read_parts(chunk, 8)]
    assert pa.concat_tables(parts)["x"].to_pylist() == expected
    for value in [] if pa.types.is_nested(common) else filter(None, expected):
        found = values(open_parquet(tmp_path, filters=pc.field("x") == value))
        assert found == [each for each in expected if each == value]


def test_int96_is_an_instant_in_microseconds(tmp_path: Path) -> None:
    """Spark writes it by default. In nanoseconds, it has the years 1678 to 2262 only."""
    instants = [datetime(year, 1, 1, 12, tzinfo=timezone.utc) for year in (1500, 9999)]
    x = pa.array(instants, pa.timestamp("us", "UTC"))
    table = pa.table({"x": x, "l": pa.array([[each] for each in instants])})
    pq.write_table(table, tmp_path / "1.parquet", use_deprecated_int96_timestamps=True)
    pq.write_table(table, tmp_path / "2.parquet")  # as TIMESTAMP(MICROS)
    source = open_parquet(tmp_path)
    assert values(source) == instants * 2
    assert values(source, "l") == [[each] for each in instants] * 2
    late = open_parquet(tmp_path, filters=pc.field("x") > instants[0], columns=["x"])
    assert values(late) == instants[1:] * 2


def test_files_that_change_or_have_no_rows_are_errors(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("part.parquet", x=range(8))
    source = open_parquet(path)
    first = source.read(0)
    assert source.read(0) is first, "the row group read last is kept"
    write("part.parquet", x=range(7))
    with pytest.raises(RuntimeError, match=f"{path} has changed since"):
        source.read(1)
    with pytest.raises(ValueError, match=f"{path} has no rows that the filters select"):
        from_parquet(path, filters=[("x", ">", 7)])
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(ValueError, match="7 rows, which is less than one for each of the 9 ranks"):
        from_parquet(path)


def read_shards(passed: Any, path: str) -> list[list[Any]]:
    """Return this rank's rows of a shard that was passed, and of shards that are made here."""
    return [
        [x for batch in shard.iter_batches(batch_size=2) for x in batch["x"].tolist()]
        for shard in (passed, from_parquet(path, equal="drop"), from_parquet(path, split=False))
    ]


def test_a_shard_can_be_passed_to_the_ranks_or_made_there(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("files/part.parquet", x=range(11))
    monkeypatch.chdir(tmp_path)
    shard = from_parquet("files")
    assert shard.count() == 11
    distributor = TorchDistributor(3, local_mode=True, use_gpu=False, timeout=120)
    found = distributor.run_all(read_shards, shard, os.path.abspath("files"))
    passed, made, whole = zip(*found, strict=True)
    assert list(made) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [len(rows) for rows in passed] == [4, 4, 4]
    assert {x for rows in passed for x in rows} == set(range(11))
    assert list(whole) == [list(range(11))] * 3
