"""Arrow tables become tensors: every type, chunked and sliced; and what cannot is an error."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributor.data.parquet import open_parquet
from distributor.data.tensors import TensorOptions, check_columns, to_tensors

DAY = 24 * 3600 * 10**6
VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)
NAN = float("nan")


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, values: dict[int, float]) -> dict[str, Any]:
    return {"type": 0, "size": size, "indices": [*values], "values": [*values.values()]}


def variants(values: list[Any], kind: pa.DataType) -> Iterator[pa.Table]:
    """Yield tables with the same values: in one chunk, in several, and with offsets."""
    array = pa.array(values, kind)
    yield pa.table({"x": array})
    single = [array.slice(at, 1) for at in range(len(array))]
    yield pa.table({"x": pa.chunked_array([*single[:1], array[:0], *single[1:]], kind)})
    around = pa.array([*values[-1:], *values, *values[:1]], kind)
    yield pa.table({"x": around}).slice(len(values[-1:]), len(values))


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor):
        same_type = found.dtype == expected.dtype and found.shape == expected.shape
        return same_type and torch.equal(found, expected)
    if isinstance(found, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def utc(*args: int) -> dt.datetime:
    return dt.datetime(*args, tzinfo=dt.timezone.utc)  # type: ignore[arg-type, misc]


INT, L, tensor = pa.int64(), pa.list_, torch.tensor
DECIMAL, INSTANT = pa.decimal128(9, 2), pa.timestamp("ms", "UTC")
INTEGERS = {
    **{getattr(pa, f"int{bits}")(): getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{pa.uint8(): torch.uint8, pa.uint16(): torch.int32},
    **{pa.uint32(): torch.int64, pa.uint64(): torch.int64},
}
FLOATS = {pa.float16(): torch.float16, pa.float32(): torch.float32, pa.float64(): torch.float64}
TYPES: list[tuple[pa.DataType, list[Any], Any]] = [
    *((kind, [0, 1, 127], tensor([0, 1, 127], dtype=dtype)) for kind, dtype in INTEGERS.items()),
    # The oldest pyarrow converts no float of Python to float16.
    *((kind, list(np.array([0.5, -2], np.float16)), tensor([0.5, -2], dtype=dtype))
      for kind, dtype in FLOATS.items()),
    (pa.bool_(), [True, False, True] * 7, tensor([True, False, True] * 7)),
    (pa.decimal128(38, 2), [Decimal("1.25"), Decimal(-3)], tensor([1.25, -3]).double()),
    (pa.date32(), [dt.date(1970, 1, 2), dt.date(1969, 12, 31)], tensor([1, -1]).int()),
    (pa.timestamp("us"), [dt.datetime(1970, 1, 2), dt.datetime(1969, 12, 31)], tensor([DAY, -DAY])),
    (pa.timestamp("us", "UTC"), [utc(1970, 1, 1, 0, 0, 1)], tensor([10**6])),
    (pa.timestamp("ns"), [1_999, -1_000], tensor([1, -1])),
    (pa.duration("us"), [dt.timedelta(days=-1)], tensor([-DAY])),
    (pa.string(), ["a", "", "ü"], ["a", "", "ü"]),
    (pa.binary(), [b"\0a", b""], [b"\0a", b""]),
    (pa.binary(2), [b"ab", b"cd"], [b"ab", b"cd"]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"], ["a", "b", "a"]),
    (L(pa.float32()), [[1, 2], [3, 4], [5, 6]], tensor([[1.0, 2], [3, 4], [5, 6]])),
    (L(INT, 2), [[1, 2], [3, 4], [5, 6]], tensor([[1, 2], [3, 4], [5, 6]])),
    (L(pa.bool_()), [[True, False], [False, True]], tensor([[True, False], [False, True]])),
    (L(INT), [[], []], torch.empty(2, 0, dtype=torch.int64)),
    (L(L(pa.float32())), [[[1], [2]], [[3], [4]]], tensor([[[1.0], [2]], [[3], [4]]])),
    (L(pa.string()), [["a"], [], ["b", "c"]], [["a"], [], ["b", "c"]]),
    (
        pa.struct([("a", INT), ("b", pa.struct([("c", L(pa.float32())), ("d", pa.string())]))]),
        [{"a": 1, "b": {"c": [1, 2], "d": "x"}}, {"a": 2, "b": {"c": [3, 4], "d": "y"}}],
        {"a": tensor([1, 2]), "b": {"c": tensor([[1.0, 2], [3, 4]]), "d": ["x", "y"]}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "expected"), TYPES, ids=lambda value: str(value)[:40])
def test_each_type_becomes_what_the_table_says(
    kind: pa.DataType, values: list[Any], expected: Any
) -> None:
    for table in variants(values, kind):
        check_columns(table.schema, TensorOptions(), {"x": 0}, "train")
        for options in (TensorOptions(), TensorOptions(private=frozenset("x"))):
            [found] = to_tensors(table, options).values()
            assert same(found, expected), found


def test_vectors_become_rows() -> None:
    vectors = [dense(1, 2, 0), sparse(3, {1: 5}), dense(0, 0, 9), sparse(3, {}), sparse(3, {2: 2})]
    expected = tensor([[1, 2, 0], [0, 5, 0], [0, 0, 9], [0, 0, 0], [0, 0, 2]]).double()
    options = TensorOptions(vectors=frozenset({"x", "of another dataset"}))
    for rows in ([0, 2], [1, 3], range(5)):  # dense, sparse, mixed
        for table in variants([vectors[row] for row in rows], VECTOR):
            assert same(to_tensors(table, options)["x"], expected[list(rows)])


def test_vectors_of_unequal_sizes_and_nulls() -> None:
    options = TensorOptions(vectors=frozenset("x"))
    unequal = pa.table({"x": pa.array([dense(1, 2), sparse(3, {})], VECTOR)})
    with pytest.raises(ValueError, match=r"'x' has unequal lengths, from 2 to 3\."):
        to_tensors(unequal, options)
    null = pa.table({"x": pa.array([None, dense(1, 2), None, sparse(2, {1: 3})], VECTOR)})
    with pytest.raises(ValueError, match="'x' has 2 nulls"):
        to_tensors(null, options)
    filled = to_tensors(null, TensorOptions(torch.float32, -1, vectors=options.vectors))["x"]
    assert same(filled, torch.tensor([[-1.0, -1], [1, 2], [-1, -1], [0, 3]]))


def ragged(value: Any) -> TensorOptions:
    return TensorOptions(ragged=value)


@pytest.mark.filterwarnings("error")
def test_tensors_use_private_memory_that_can_be_written_to(tmp_path: Path) -> None:
    columns = {
        "array": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32())),
        "kept": pa.array([1, 2, 3, 4]),
        "null": pa.array([1, None, 3, 4]),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    table = open_parquet(tmp_path / "rows.parquet").read(0)
    options = TensorOptions(private=frozenset({"array", "null"}), fill=0)
    for part in (table, table.slice(1, 2)):
        copies = to_tensors(part, TensorOptions(fill=0))
        tensors = to_tensors(part, options)
        assert same(tensors, copies)
        for name in columns:
            tensors[name].add_(1)
        again = to_tensors(part, options)
        assert same(again["array"], tensors["array"]), "it has the memory of the table"
        assert all(same(again[name], copies[name]) for name in ("kept", "null"))


@given(
    st.lists(st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=4), max_size=8),
    st.integers(0, 8),
)
def test_ragged_arrays_round_trip(rows: list[list[int | None] | None], cut: int) -> None:
    filled = [[-1 if value is None else value for value in row or []] for row in rows]
    array = pa.array(rows, pa.list_(pa.int64())).fill_null([])
    table = pa.table({"x": pa.chunked_array([array[:cut], array[cut:]])})
    listed = to_tensors(table, TensorOptions(fill=-1, ragged="list"))["x"]
    nested = to_tensors(table, TensorOptions(fill=-1, ragged="nested"))["x"]
    assert [row.tolist() for row in listed] == filled
    assert [row.tolist() for row in nested.unbind()] == filled


RAGGED = pa.table({"x": pa.array([[1, 2], [], [3]], pa.list_(pa.float32())), "y": [[1], [2], [3]]})


def test_ragged_is_by_column_or_for_all() -> None:
    with pytest.raises(ValueError, match=r"'x' has unequal lengths, from 0 to 2.* ragged='nested'"):
        to_tensors(RAGGED, TensorOptions())
    found = to_tensors(RAGGED, ragged({"x": "nested"}))
    assert found["x"].layout == torch.jagged
    assert [row.tolist() for row in found["x"].unbind()] == [[1, 2], [], [3]]
    assert same(found["y"], torch.tensor([[1], [2], [3]]))
    found = to_tensors(RAGGED, TensorOptions(torch.float64, ragged="list"))
    assert same(found["x"], [torch.tensor(row).double() for row in ([1, 2], [], [3])])
    # They are equal in some batches by chance, which does not change what they become.
    assert to_tensors(RAGGED.slice(1, 1), ragged("nested"))["x"].is_nested
    assert isinstance(to_tensors(RAGGED.slice(1, 1), ragged("list"))["x"], list)


ADDRESS = pa.struct([("zip", pa.int64()), ("city", pa.string())])
INSIDE = "'x' (inside its arrays)"
NULLS: list[tuple[pa.DataType, list[Any], str, Any, Any]] = [
    (INT, [1, None, 3, None], "'x' has 2 nulls", 7, tensor([1, 7, 3, 7])),
    (pa.bool_(), [None, True], "'x' has 1 null", False, tensor([False, True])),
    (DECIMAL, [None, Decimal(2)], "'x' has 1 null", Decimal("0.5"), tensor([0.5, 2]).double()),
    (INSTANT, [None], "'x' has 1 null", utc(1970, 1, 2), tensor([DAY])),
    (pa.string(), ["a", None], "'x' has 1 null", "b", ["a", "b"]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", None], "'x' has 1 null", "b", ["a", "b"]),
    (L(INT), [[1, None], [None, 4]], f"{INSIDE} has 2 nulls", 9, tensor([[1, 9], [9, 4]])),
    (L(INT), [None, [1, 2], None], "'x' has 2 nulls", 9, tensor([[9, 9], [1, 2], [9, 9]])),
    (L(INT, 2), [None, [1, None]], "'x' has 1 null.", 9, tensor([[9, 9], [1, 9]])),
    (L(pa.string()), [["a", None], []], f"{INSIDE} has 1 null", "b", [["a", "b"], []]),
]


def test_nulls_are_an_error_or_filled() -> None:
    for kind, values, message, fill, expected in NULLS:
        for table in variants(values, kind):
            with pytest.raises(ValueError, match=re.escape(f"Column {message}")):
                to_tensors(table, TensorOptions())
            options = TensorOptions(fill={"x": fill})
            check_columns(table.schema, options, {"x": table["x"].null_count}, "train")
            assert same(to_tensors(table, options)["x"], expected)


def test_nulls_in_structs_are_those_of_their_fields() -> None:
    values = [None, {"zip": None, "city": "a"}, {"zip": 3, "city": "b"}]
    for table in variants(values, ADDRESS):
        with pytest.raises(ValueError, match=r"'x\.zip' has 2 nulls.* fill={'x\.zip': 0}\."):
            to_tensors(table, TensorOptions())
        found = to_tensors(table, TensorOptions(fill={"x.zip": 1, "x.city": ""}))["x"]
        assert same(found, {"zip": torch.tensor([1, 1, 3]), "city": ["", "a", "b"]})


def test_null_arrays_of_unknown_length_cannot_be_filled() -> None:
    table = pa.table({"x": pa.array([None, []], pa.list_(pa.int64()))})
    with pytest.raises(ValueError, match="'x' has 1 null instead of arrays, which fill cannot"):
        to_tensors(table, TensorOptions(fill=0, ragged="list"))
    table = pa.table({"x": pa.array([None, None], pa.list_(pa.int64()))})
    with pytest.raises(ValueError, match="'x' is null in each of 2 rows"):
        to_tensors(table, TensorOptions(fill=0))


def test_a_fill_that_does_not_fit_is_an_error() -> None:
    for kind, fill in (
        (pa.int64(), 1.5),
        (pa.int64(), NAN),
        (pa.int8(), 1000),
        (pa.uint8(), -1),
        (pa.bool_(), 0),
        (pa.string(), 0),
        (pa.list_(pa.int64()), [0]),
    ):
        message = rf"Column 'x' of train .*has the type .*, which fill={re.escape(repr(fill))} does"
        with pytest.raises(ValueError, match=message):
            check_columns(pa.schema({"x": kind}), TensorOptions(fill={"x": fill}), None, "train")
    found = to_tensors(pa.table({"x": [1, None]}), TensorOptions(torch.float32, {"x": NAN}))["x"]
    assert found[1].isnan(), "integers that become floats can be filled with it"


def test_dtypes_are_for_all_tensors_or_by_column() -> None:
    table = pa.table({"a": [1], "b": [[2.5]], "s": ["x"], "c": [{"d": True, "e": 5}]})
    found = to_tensors(table, TensorOptions(torch.float32))
    assert same(found["a"], torch.tensor([1.0]))
    assert same(found["c"], {"d": torch.tensor([1.0]), "e": torch.tensor([5.0])})
    found = to_tensors(table, TensorOptions({"b": torch.bfloat16, "c.e": torch.uint8}))
    assert [found["a"].dtype, found["b"].dtype] == [torch.int64, torch.bfloat16]
    assert [column.dtype for column in found["c"].values()] == [torch.bool, torch.uint8]


SCHEMA = pa.schema({"a": pa.int64(), "s": pa.string(), "l": pa.list_(pa.int64()), "c": ADDRESS})
COLUMNS = "but the columns of train are 'a', 's', 'l', 'c.zip', 'c.city'"


def test_options_name_columns_that_exist() -> None:
    for options, message in (
        (TensorOptions(fill={"b": 0, "a": 0}), f"fill names 'b', {COLUMNS}"),
        (TensorOptions({"s": torch.int8}), "'s' of train has the type string, .* without a dtype"),
        (ragged({"a": "list"}), "'a' of train .* int64, to which ragged does not apply"),
    ):
        with pytest.raises(ValueError, match=message):
            check_columns(SCHEMA, options, None, "train")


def test_a_type_without_a_tensor_is_an_error() -> None:
    message = r"^Column 'x(\.f)?' of train .*has the type .*, which has no tensor\. .*df\.drop"
    maps, null = pa.map_(pa.string(), pa.int64()), pa.null()
    for kind in (maps, null, pa.list_(maps), pa.struct([("f", null)])):
        with pytest.raises(TypeError, match=message):
            check_columns(pa.schema({"a": INT, "x": kind}), TensorOptions(), None, "train")
    with pytest.raises(ValueError, match="Column 'x' of train exists twice"):
        check_columns(pa.schema([("x", INT), ("x", INT)]), TensorOptions(), None, "train")


def test_values_that_do_not_fit_name_the_column() -> None:
    for value, kind in ((2**63, pa.uint64()), (2**62, pa.timestamp("s"))):
        with pytest.raises(ValueError, match="Column 'x' has a value that does not fit int64"):
            to_tensors(pa.table({"x": pa.array([value], kind)}), TensorOptions())
