"""A model's outputs as columns of a DataFrame."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import facts_in, needs_java
from support.canary import relies_on

from distributor.data import (
    from_parquet,
    predict,
    predict_batch_udf,
    prediction,
    prediction_task,
    shared_model,
)
from distributor.data.outputs import to_arrow, type_of
from distributor.errors import UnpicklableError
from distributor.spark.session import Session

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.spark, needs_java]
WIDTH, ROWS = 3, 1000


def load_linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, 2)


def expected(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        found: np.ndarray[Any, Any] = load_linear()(torch.from_numpy(values)).numpy()
    return found


@pytest.fixture(scope="module")
def values() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).random((ROWS, WIDTH), dtype=np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, values: np.ndarray[Any, Any]) -> Path:
    """Write rows with an id and an array, in row groups of different sizes."""
    folder = tmp_path_factory.mktemp("files")
    table = pa.table(
        {"id": np.arange(ROWS), "x": list(values), "text": list(map(str, range(ROWS)))}
    )
    table = table.set_column(1, "x", table["x"].cast(pa.list_(pa.float32())))
    pq.write_table(table.slice(0, 700), folder / "a.parquet", row_group_size=150)
    pq.write_table(table.slice(700), folder / "b.parquet", row_group_size=90)
    return folder


@pytest.fixture(params=["rows", "files"])
def data(request: pytest.FixtureRequest, spark: Any, files: Path) -> Any:
    return spark.read.parquet(str(files)) if request.param == "rows" else from_parquet(files)


def test_outputs_are_those_of_one_process(data: Any, values: np.ndarray[Any, Any]) -> None:
    frame = predict(data, load_linear, columns="x", outputs="y array<float>", batch_size=64)
    assert frame.dtypes == [
        ("id", "bigint"), ("x", "array<float>"), ("text", "string"), ("y", "array<float>")
    ]  # fmt: skip
    rows = sorted(frame.collect(), key=lambda row: row.id)
    assert [row.id for row in rows] == list(range(ROWS))
    assert [row.text for row in rows] == list(map(str, range(ROWS)))
    assert np.array_equal(np.array([row.x for row in rows], np.float32), values)
    found = np.array([row.y for row in rows], np.float32)
    # Matrices of other sizes may round otherwise.
    np.testing.assert_allclose(found, expected(values), rtol=1e-6)


def test_a_model_that_writes_into_its_input_changes_no_column(
    data: Any, values: np.ndarray[Any, Any]
) -> None:
    def load() -> Any:
        import warnings

        warnings.simplefilter("error")
        return lambda batch: {"y": batch["x"].mul_(2), "at": batch["id"].neg_()}

    outputs = "y array<float>, at int"
    frame = predict(
        data, load, columns=["x", "id"], keep=["id", "x"], outputs=outputs, batch_size=64
    )
    rows = sorted(frame.collect(), key=lambda row: -row["at"])
    assert [row["at"] for row in rows] == [-at for at in range(ROWS)]
    assert np.array_equal(np.array([row.y for row in rows], np.float32), values * 2)
    assert [row.id for row in rows] == list(range(ROWS))
    assert np.array_equal(np.array([row.x for row in rows], np.float32), values)


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_types_are_found_and_columns_are_kept(data: Any) -> None:
    def load() -> Any:
        def model(batch: dict[str, Any]) -> dict[str, Any]:
            total = batch["x"].sum(dim=1)
            return {
                "label": total > 1.5,
                "half": total.to(torch.bfloat16),
                "double id": batch["id"].numpy() * 2,
                "matrix": torch.stack([total, total], 1).reshape(-1, 1, 2),
                "reversed": [text[::-1] for text in batch["text"]],
            }

        return model

    frame = predict(data, load, keep=["id"])
    assert frame.dtypes == [
        ("id", "bigint"),
        ("label", "boolean"),
        ("half", "float"),
        ("double id", "bigint"),
        ("matrix", "array<array<float>>"),
        ("reversed", "string"),
    ]
    row = frame.where("id = 123").first()
    assert row["double id"] == 246
    assert row["reversed"] == "321"
    assert np.shape(row["matrix"]) == (1, 2)
    assert frame.count() == ROWS
    assert predict(data, load_linear, columns="x", keep=[]).dtypes == [
        ("prediction", "array<float>")
    ]


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_each_core_has_the_same_number_of_tasks(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture's cluster has 4 cores, and the files have 9 row groups of 35 kB in all."""
    for part, tasks in ((10**9, 4), (5000, 8), (1, 9)):
        monkeypatch.setattr(prediction, "PARTITION_BYTES", part)
        frame = predict(data, load_linear, columns="x", keep=[], outputs="y array<float>")
        assert frame.rdd.getNumPartitions() == tasks


@pytest.mark.parametrize("data", ["rows"], indirect=True)
def test_models_that_cannot_be_pickled_are_loaded_once_in_each_worker(data: Any) -> None:
    def load_of(offset: int) -> Any:
        def load() -> Any:
            import uuid

            identity, lock = f"{offset} {uuid.uuid4().hex}", threading.Lock()

            def model(batch: dict[str, Any]) -> dict[str, Any]:
                with lock:
                    return {"model": [identity] * len(batch["id"]), "y": batch["id"] + offset}

            return model

        return load

    outputs = "model string, y bigint"
    first, second = (
        predict(data, load_of(n), columns=["id"], keep=["id"], outputs=outputs, batch_size=10)
        for n in (1, 2)
    )
    models = [set[str](), set[str]()]
    for _ in range(2):
        for seen, frame in zip(models, (first, second), strict=True):
            seen |= {row.model for row in frame.collect()}
    slots = 4  # of the fixture's cluster
    assert all(1 <= len(seen) <= slots for seen in models), models
    joined = first.join(second.withColumnRenamed("y", "z").drop("model"), "id")
    assert joined.where("z - y = 1 and y - id = 1").count() == ROWS


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_an_executor_loads_a_model_once(data: Any, tmp_path: Path) -> None:
    loads = tmp_path / "loads"

    def load() -> torch.nn.Module:
        import os

        with open(loads, "a") as file:
            file.write(f"{os.environ['SPARK_LOCAL_DIRS']}\n")
        torch.set_float32_matmul_precision("high")

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.full((1000,), 2.0))

            def forward(self, batch: torch.Tensor) -> dict[str, Any]:
                begin = self.weight.data_ptr()
                with open("/proc/self/maps") as file:
                    maps = [line.split() for line in file if "distributor-models" in line]
                bounds = [[int(each, 16) for each in line[0].split("-")] for line in maps]
                is_mapped = any(first <= begin < last for first, last in bounds)
                precision = torch.get_float32_matmul_precision()
                rows = len(batch)
                return {
                    "y": batch * self.weight[0].long(),
                    "is_mapped": [str(is_mapped)] * rows,
                    "settings": [f"{precision} {self.training}"] * rows,
                    "process": [str(os.getpid())] * rows,
                }

        return Model()

    outputs = "y bigint, is_mapped string, settings string, process string"
    frame = predict(data, load, columns="id", keep=["id"], outputs=outputs, batch_size=10)
    rows = [row for _ in range(2) for row in frame.collect()]
    assert sorted(row.y for row in rows) == sorted(2 * n for n in [*range(ROWS)] * 2)
    assert {(row.is_mapped, row.settings) for row in rows} == {("True", "high False")}
    executors = loads.read_text().splitlines()
    assert len(executors) == len(set(executors)) <= 2
    assert len({row.process for row in rows}) > len(executors)


def test_a_class_that_changes_is_used_as_it_is_now(spark: Any) -> None:
    from pyspark.sql.types import LongType

    class Net(torch.nn.Module):
        bias = 0

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch + self.bias

    def make() -> Any:
        return lambda x: Net()(torch.from_numpy(x)).numpy()

    rows = spark.range(2).coalesce(1)
    for bias in (0, 100, 0):
        Net.bias = bias
        frame = predict(rows, Net, columns="id", keep=[], outputs="y long")
        score = predict_batch_udf(make, return_type=LongType(), batch_size=2)
        assert {row.y for row in frame.collect()} == {bias, bias + 1}
        assert {row.y for row in rows.select(score("id").alias("y")).collect()} == {bias, bias + 1}


def test_killed_tasks_cost_no_row(spark: Any, tmp_path: Path) -> None:
    """One is killed while it loads the model, and one while it uses it."""

    def die_once(name: str) -> None:
        import contextlib
        import os
        import signal

        with contextlib.suppress(FileExistsError), open(tmp_path / name, "x"):
            os.kill(os.getpid(), signal.SIGKILL)

    def load() -> torch.nn.Module:
        die_once("loading")

        class Model(torch.nn.Module):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                if 500 in ids:
                    die_once("using")
                return 2 * ids

        return Model()

    rows = spark.range(0, ROWS, 1, 8)
    found = predict(rows, load, columns="id", outputs="y long", keep=["id"], batch_size=50)
    assert {row.id: row.y for row in found.collect()} == {at: 2 * at for at in range(ROWS)}
    assert {path.name for path in tmp_path.iterdir()} == {"loading", "using"}


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_the_users_modules_are_sent(
    data: Any, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a function imports, and again when they have changed."""
    from pyspark.sql.types import DoubleType

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which could hide the change
    (tmp_path / "my_offsets.py").write_text("OFFSET = 0.5")
    for factor in (2, 30):
        (tmp_path / "my_models.py").write_text(f"def scaled(ids): return {factor} * ids")
        monkeypatch.delitem(sys.modules, "my_models", raising=False)
        scaled = importlib.import_module("my_models").scaled

        def load(scaled: Any = scaled) -> Any:
            from my_offsets import OFFSET

            return lambda ids: scaled(ids) + OFFSET

        found = predict(data, load, columns="id", outputs="y double", keep=["id"]).collect()
        assert {row.id: row.y for row in found} == {at: factor * at + 0.5 for at in range(ROWS)}

    def make() -> Any:
        def function(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            from my_models import scaled

            return np.asarray(scaled(ids), np.float64)

        return function

    score = predict_batch_udf(make, return_type=DoubleType(), batch_size=64)
    assert spark.range(ROWS).select(score("id").alias("y")).where(f"y = {factor} * id").count() == (
        ROWS
    ), "a function may import when it is called"

    def paths(batches: Any) -> Any:
        for batch in batches:
            yield pa.record_batch({"path": [sys.path] * len(batch)})

    rows = spark.range(0, 8, 1, 8)
    later = Session(spark).map_in_arrow(rows, paths, "path array<string>").collect()
    assert len(later) == 8
    assert not [row for row in later if "distributor-modules" in str(row)], "as ranks would get"


@pytest.mark.parametrize("data", ["rows"], indirect=True)
def test_a_checkpoint_is_loaded(data: Any, tmp_path: Path) -> None:
    from distributor.train import Checkpoint

    torch.save(torch.full((WIDTH,), 3.0), tmp_path / "weight.pt")

    def load(folder: str) -> Any:
        weight = torch.load(f"{folder}/weight.pt")
        return lambda batch: batch @ weight

    checkpoint = Checkpoint(str(tmp_path))
    for given in (checkpoint, SimpleNamespace(checkpoint=checkpoint)):
        row = predict(data, load, checkpoint=given, columns="x").first()
        assert row.prediction == pytest.approx(3 * sum(row.x))


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_vectors_and_structs_are_outputs(data: Any) -> None:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import StructType

    def load() -> Any:
        def model(batch: dict[str, Any]) -> dict[str, Any]:
            parts = {"id": batch["id"], "of": {"text": batch["text"], "twice": 2 * batch["x"]}}
            return {"v": batch["x"], "parts": parts}

        return model

    frame = predict(data, load, keep=["x"])
    assert frame.dtypes[2] == (
        "parts",
        "struct<id:bigint,of:struct<text:string,twice:array<float>>>",
    )
    outputs = StructType([*StructType().add("v", VectorUDT()), frame.schema["parts"]])
    rows = predict(data, load, keep=["x"], outputs=outputs).where("parts.id < 10").collect()
    assert sorted(row.parts.id for row in rows) == list(range(10))
    for row in rows:
        assert row.v.toArray().tolist() == row.x
        assert row.parts.of.text == str(row.parts.id)
        assert row.parts.of.twice == [2 * value for value in row.x]


def test_columns_do_not_use_the_models_memory() -> None:
    output = torch.arange(6.0).reshape(2, 3).T
    column = to_arrow(output, pa.list_(pa.float32()), 3, "y")
    output.zero_()
    assert column.to_pylist() == [[0, 3], [1, 4], [2, 5]]


LISTS: list[tuple[Any, pa.DataType, list[Any]]] = [  # outputs, their types, and the rows
    (["a", None], pa.string(), ["a", None]),
    ([["a", "b"], ["c"]], pa.list_(pa.string()), [["a", "b"], ["c"]]),
    ([("a", None), None], pa.list_(pa.string()), [["a", None], None]),
    ([[["a"], []], []], pa.list_(pa.list_(pa.string())), [[["a"], []], []]),
    (np.array([["a", "b"]] * 2), pa.list_(pa.string()), [["a", "b"]] * 2),
    (np.array([["a", None]] * 2, object), pa.list_(pa.string()), [["a", None]] * 2),
    (np.array([1, None], object), pa.int64(), [1, None]),
    (np.ma.masked_array([1, 2], [False, True]), pa.int64(), [1, None]),
    ([np.int32(1), None], pa.int64(), [1, None]),
    ([torch.tensor(1.5), torch.tensor(2)], pa.float64(), [1.5, 2.0]),
    ([torch.arange(2), torch.arange(0)], pa.list_(pa.int64()), [[0, 1], []]),
    (np.array([[b"a"], [b"b"]]), pa.list_(pa.binary()), [[b"a"], [b"b"]]),
    (torch.tensor([True, False]), pa.bool_(), [True, False]),
    (torch.ones(2, 1, dtype=torch.bfloat16), pa.list_(pa.float32()), [[1.0], [1.0]]),
    (np.ones((2, 0), np.uint8), pa.list_(pa.int16()), [[], []]),
]


@pytest.mark.parametrize(("output", "kind", "rows"), LISTS, ids=lambda value: str(value)[:40])
def test_lists_and_nulls_are_outputs(output: Any, kind: pa.DataType, rows: list[Any]) -> None:
    assert type_of(output, "y") == kind
    assert to_arrow(output, kind, 2, "y").to_pylist() == rows
    if pa.types.is_integer(kind):
        assert to_arrow(output, pa.float32(), 2, "y").to_pylist() == rows


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "Output 'y' is of the type NoneType. A model must return"),
        ("ab", "Output 'y' is of the type str. A model must return"),
        ((each for each in "ab"), "Output 'y' is of the type generator. A model must return"),
        ([1, "a"], "Output 'y' has values of no common type"),
        ([object()] * 2, "Output 'y' has values of no common type"),
        ([[], [None]], "Output 'y' has no value in the first rows but None and empty lists"),
        ([None] * 2, "Output 'y' has no value in the first rows but None and empty lists"),
        (np.array(["2024-01-01"] * 2, "M8[ns]"), "Output 'y' is of the type ndarray"),
        ([datetime(2024, 1, 1)] * 2, "Output 'y' has the type timestamp[us], for which there is"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_output_without_a_type(output: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        type_of(output, "y")


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        (["a"], pa.string(), "Output 'y' has 1 values for 2 rows"),
        (["a", "b"], pa.list_(pa.string()), "Output 'y' does not fit list<"),
        ([["a"], ["b"]], pa.string(), "Output 'y' does not fit string"),
        ([1, 1.5], pa.int64(), "Output 'y' does not fit int64"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit(output: Any, kind: pa.DataType, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        to_arrow(output, kind, 2, "y")


def test_a_model_waits_only_for_the_worker_that_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_model, "_folder", lambda: tmp_path)
    monkeypatch.setattr(shared_model, "LOADING_SECONDS", 0.2)
    loading, loaded = threading.Event(), threading.Event()

    def load() -> Any:
        loading.set()
        assert loaded.wait(60)
        return torch.ones(1)

    first = threading.Thread(target=shared_model.load_once, args=("first", load))
    first.start()
    try:
        assert loading.wait(60)
        assert shared_model.load_once("second", lambda: torch.zeros(1)).item() == 0
        with pytest.raises(TimeoutError, match=r"loading the model for more than 0\.2 s"):
            shared_model.load_once("first", load)
    finally:
        loaded.set()
        first.join(60)
    assert shared_model.load_once("first", torch.empty).item() == 1


def exported() -> Any:
    program: Any = torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))
    return program.module()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: None, "load has returned None, which is no model. It must return a module"),
        (dict, "load has returned a value of type dict, which is no model"),
        (exported, "load has returned an exported module, which eval() does not support"),
    ],
)
def test_what_load_returns_is_no_model(
    load: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_task, "load_once", lambda _, load: load())
    functions = cloudpickle.dumps([load, None, None])
    plan: Any = SimpleNamespace(functions=functions, default="y", key="key")
    with pytest.raises(TypeError, match=re.escape(message)):
        prediction_task.Model(plan, "cpu", torch.get_num_threads())


def test_an_output_that_is_no_struct() -> None:
    column = pa.struct([("a", pa.int64())])
    with pytest.raises(ValueError, match="Output 'y' is no dict, and its column is a struct"):
        to_arrow(torch.ones(2), column, 2, "y")
    with pytest.raises(ValueError, match=r"Output 'y' is a dict of b, .* struct of a\."):
        to_arrow({"b": torch.ones(2)}, column, 2, "y")
    with pytest.raises(ValueError, match=r"Output 'y\.a' has 3 values for 2 rows"):
        to_arrow({"a": torch.ones(3)}, column, 2, "y")


def test_vectors_texts_and_nulls(spark: Any) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([1.0, 2.0]), "a b", 1), (Vectors.sparse(2, {1: 3.0}), "c", None)]

    frame = spark.createDataFrame(rows, ["v.w", "text", "n"])

    def collate(batch: dict[str, Any]) -> Any:
        return batch["v.w"].sum(1) + batch["n"], [len(text.split()) for text in batch["text"]]

    def load() -> Any:
        return lambda batch: {"y": batch[0], "tokens": torch.tensor(batch[1])}

    settings: dict[str, Any] = {"collate_fn": collate, "outputs": "y double, tokens int"}
    found = predict(frame, load, fill=-1, keep=["v.w"], **settings).collect()
    assert sorted((row.y, row.tokens) for row in found) == [(2.0, 1), (4.0, 2)]
    assert {type(row["v.w"]).__name__ for row in found} == {"DenseVector", "SparseVector"}
    with pytest.raises(Exception, match=r"ValueError for rows 0 to 0 of partition .*has 1 null"):
        predict(frame, load, **settings).collect()


TEXTS = pa.dictionary(pa.int32(), pa.string())
COLUMNS = {  # of a Parquet file
    "uint8": pa.array([200, None], pa.uint8()),
    "uint16": pa.array([60_000, None], pa.uint16()),
    "uint32": pa.array([2**32 - 1, None], pa.uint32()),
    "uint64": pa.array([2**64 - 1, None], pa.uint64()),
    "date64": pa.array([datetime(1500, 1, 2), None], pa.date64()),
    "milliseconds": pa.array([1, None], pa.timestamp("ms")),
    "instant in milliseconds": pa.array([1, None], pa.timestamp("ms", "Europe/Berlin")),
    "duration": pa.array([5, None], pa.duration("ms")),
    "boolean": pa.array([True, None]),
    "bytes": pa.array([b"ab", None]),
    "fixed-size bytes": pa.array([b"ab", None], pa.binary(2)),
    "large string": pa.array(["x", None], pa.large_string()),
    "dictionary": pa.array(["x", None], TEXTS),
    "list of dictionaries": pa.array([["x"], None], pa.list_(TEXTS)),
    "large list": pa.array([[1], None], pa.large_list(pa.uint8())),
    "fixed-size list": pa.array([[1.5, 2.5], [3.5, 4.5]], pa.list_(pa.float32(), 2)),
    "nested list": pa.array([[[1], []], None]),
    "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.uint8())),
    "structs": pa.array([[{"a": 1, "b": [datetime(2024, 1, 1)]}], None]),
    "decimal": pa.array([Decimal("1.5"), None], pa.decimal256(38, 2)),
    "nulls": pa.nulls(2),
    "list of nulls": pa.array([[None], None]),
}
FOLDERS = {  # values in their names, which become columns
    "int": ["1", "007"],
    "long": ["1", str(2**40)],
    "double": ["0.5", "1"],
    "long and double": ["0.5", str(2**40)],
    "text": ["x", "a b"],
    "boolean": ["true", "false"],
    "hexadecimal": ["0x10", "0x11"],
    "date": ["2024-01-01", "1500-01-01"],
    "no date": ["2024-02-30", "2024-01-01"],
    "instant": ["2024-01-01 10:00:00", "2024-07-01 10:00:00"],
    "null": ["1", "__HIVE_DEFAULT_PARTITION__"],
}
SPARKS = (  # SQL of columns that Spark writes
    "timestamp'1500-01-01 10:00:00' t",
    "timestamp_ntz'9999-01-01 10:00:00' ntz",
    "array(timestamp'9999-01-01 10:00:00') ts",
    "named_struct('t', timestamp'1500-01-01 10:00:00', 'd', date'1500-01-01') s",
    "interval '1 02:03:04' day to second i",
    "cast(1.5 as decimal(38, 10)) d",
    "cast(id as tinyint) tiny",
    "map('a', array(1, null)) m",
    "cast('a' as binary) b",
)


def test_files_have_the_types_that_spark_reads(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    folder = tmp_path / "written by pyarrow"
    for at in range(2):
        names = [f"f{n}={quote(texts[at])}" for n, texts in enumerate(FOLDERS.values())]
        table = pa.table({"v": [at, 2 + at], **COLUMNS})
        (folder / "/".join(names)).mkdir(parents=True)
        pq.write_table(table, folder / "/".join(names) / "part.parquet")
    int96 = tmp_path / "INT96 written by pyarrow"
    int96.mkdir()
    t = pa.array([datetime(1500, 1, 1), datetime(9999, 1, 1)])
    table = pa.table({"v": [0, 1], "t": t, "l": pa.array([[each] for each in t])})
    pq.write_table(table, int96 / "part.parquet", use_deprecated_int96_timestamps=True)
    paths = [folder, int96]
    timezone, kind = "spark.sql.session.timeZone", "spark.sql.parquet.outputTimestampType"
    spark.conf.set(timezone, "America/New_York")
    try:
        for each in ("INT96", "TIMESTAMP_MILLIS"):
            spark.conf.set(kind, each)
            spark.range(2).selectExpr("id v", *SPARKS).write.parquet(str(tmp_path / each))
            paths.append(tmp_path / each)
        vectors = [(0, Vectors.dense(1.0, 2.0)), (1, Vectors.sparse(3, {1: 2.0}))]
        spark.createDataFrame(vectors, ["v", "f"]).write.parquet(str(tmp_path / "vectors"))
        for path in (*paths, tmp_path / "vectors"):
            expected = spark.read.parquet(str(path))
            found = predict(from_parquet(path), lambda: lambda v: v, columns="v", outputs="p long")
            assert found.drop("p").dtypes == expected.dtypes
            rows = [sorted(frame.collect(), key=lambda row: row.v) for frame in (found, expected)]
            assert [row[:-1] for row in rows[0]] == [tuple(row) for row in rows[1]]
    finally:
        spark.conf.unset(timezone)
        spark.conf.unset(kind)


def test_a_type_that_spark_does_not_have(spark: Any, tmp_path: Path) -> None:
    """It hinders nothing unless it is asked for, and then it is named."""
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"v": [1], "c": pa.nulls(1, pa.time32("s"))}), path)
    settings: dict[str, Any] = {"outputs": "p long"}
    found = predict(from_parquet(path), lambda: lambda v: v, columns="v", keep=["v"], **settings)
    assert [tuple(row) for row in found.collect()] == [(1, 1)]
    for asked in ({"columns": "v"}, {"columns": "v", "keep": ["c"]}, {"columns": "c", "keep": []}):
        with pytest.raises(
            TypeError, match=r"Column 'c' of .*part\.parquet has the type .*Leave it"
        ):
            predict(from_parquet(path), lambda: lambda v: v, **asked, **settings)


def test_a_type_that_spark_does_not_convert(spark: Any) -> None:
    """It is refused if it is an input or kept, and hinders nothing otherwise."""
    settings: dict[str, Any] = {"outputs": "p long"}
    for sql in ("interval '1' year", "array(make_interval(1))"):
        frame = spark.range(1).selectExpr("id", f"{sql} t")
        for asked in ({"columns": "t", "keep": []}, {"columns": "id"}):
            with pytest.raises(
                TypeError, match=r"'t' of the DataFrame has the type .* Cast it, or"
            ):
                predict(frame, lambda: lambda ids: ids, **asked, **settings)
        found = predict(frame, lambda: lambda ids: ids, columns="id", keep=["id"], **settings)
        assert found.dtypes == [("id", "bigint"), ("p", "bigint")]


INPUTS = [  # SQL, the type of the output, and its value
    ("timestamp'1970-01-01 00:00:01Z'", "long", 10**6),
    ("timestamp_ntz'1970-01-01 00:00:01'", "long", 10**6),
    ("array(timestamp'1970-01-01 00:00:01Z')", "array<long>", [10**6]),
    ("date'1970-01-03'", "int", 2),
    ("interval '1' day", "long", 86_400 * 10**6),
    ("cast('a' as binary)", "binary", b"a"),
    ("array('a', 'b')", "array<string>", ["a", "b"]),
]


def test_columns_of_each_type_are_inputs(spark: Any) -> None:
    frame = spark.range(1).selectExpr(*(f"{sql} t{at}" for at, (sql, *_) in enumerate(INPUTS)))
    outputs = ", ".join(f"p{at} {kind}" for at, (_, kind, _) in enumerate(INPUTS))
    model = lambda batch: {name.replace("t", "p"): value for name, value in batch.items()}  # noqa: E731
    [row] = predict(frame, lambda: model, keep=[], outputs=outputs).collect()
    assert list(row) == [value for *_, value in INPUTS]


def test_a_models_batches_are_full(data: Any, spark: Any) -> None:
    """They do not end where a row group or a batch of Spark ends."""

    def load() -> Any:
        return lambda batch: torch.full([len(batch)], len(batch))

    limit = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(limit, "20")
    try:
        found = predict(data, load, columns="x", outputs="n int", keep=[], batch_size=64).collect()
    finally:
        spark.conf.unset(limit)
    sizes = Counter(row.n for row in found)
    assert sizes.total() == ROWS
    # A task's last batch has fewer rows, and so has one after which Spark's rows came slowly.
    assert sizes[64] > ROWS / 2, sizes


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_rows_of_an_early_end(data: Any) -> None:
    """A task that is not read to its end leaves no thread that hinders the next."""
    frame = predict(data, load_linear, columns="x", outputs="y array<float>", keep=["id"])
    assert len(frame.limit(3).collect()) == 3
    assert frame.count() == ROWS


def tokenize(rows: Any) -> Any:
    return rows["no such column"]  # the line of the user


def model_of(function: Any) -> Any:
    return lambda: function


@pytest.mark.parametrize(
    ("load", "collate_fn", "outputs"),
    [
        (model_of(lambda batch: tokenize(batch)), None, None),
        (lambda: tokenize({}), None, "float"),
        (model_of(torch.abs), lambda batch: tokenize(batch), "float"),
    ],
    ids=["model", "load", "collate_fn"],
)
def test_an_error_shows_the_users_lines(
    spark: Any, load: Any, collate_fn: Any, outputs: str | None
) -> None:
    rows = spark.range(2).coalesce(1)
    with pytest.raises(Exception, match=r"KeyError.*: 'no such column'") as caught:
        predict(rows, load, columns=["id"], outputs=outputs, collate_fn=collate_fn).collect()
    shown = str(caught.value)
    assert 'return rows["no such column"]  # the line of the user' in shown
    _, _, below = shown.partition("KeyError")
    assert "/distributor/" not in below.replace("/tests/", "")
    assert shown.count("/distributor/data/") <= 1
    assert "java" not in shown
    short = model_of(lambda batch: torch.zeros(1))
    with pytest.raises(Exception, match=r"ValueError for rows .* of partition.*has 1 values for 2"):
        predict(rows, short, columns=["id"], outputs="y float").collect()


@pytest.mark.skipif(torch.cuda.is_available(), reason="executors have a GPU")
@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_an_executor_without_the_gpu_is_named(data: Any) -> None:
    frame = predict(data, load_linear, columns="x", outputs="y array<float>", device="cuda")
    with pytest.raises(Exception, match=r"The executor on .* sees no GPU, and device is 'cuda'"):
        frame.collect()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"columns": "z"}, ValueError, "columns has 'z', which is no column. The columns are id, x"),
    ({"keep": ["z"]}, ValueError, "keep has 'z', which is no column"),
    ({"keep": ["id", "id"]}, ValueError, "Column 'id' is there twice"),
    ({"outputs": "y"}, ValueError, "outputs is 'y', which is no schema. Write names and types"),
    ({"outputs": 3}, TypeError, "outputs is of the type int. Write names and types"),
    ({"outputs": "y map<int,int>"}, ValueError, "outputs has 'y' of the type map<int32, int32>"),
    ({"outputs": "y struct<a:array<date>>"}, ValueError, "outputs has 'y' of the type date32"),
    ({"outputs": "y int, y int"}, ValueError, "outputs has 'y' twice"),
    ({"outputs": "id int"}, ValueError, "'id' is an output, and also a column of the rows"),
    ({"columns": []}, ValueError, "columns is empty: name at least one column"),
    ({"keep": "id"}, TypeError, "keep must be a list of names, but is the string 'id'"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, but is 0"),
    ({"load": 3}, TypeError, "load must be a function, but is int"),
    ({"load": torch.nn.ReLU()}, TypeError, "load must be a function that returns the model, but"),
    ({"collate_fn": 3}, TypeError, "collate_fn must be a function, but is int"),
    ({"device": "no"}, RuntimeError, "no"),
    ({"checkpoint": "/a"}, TypeError, "checkpoint must be a Checkpoint, or a Result that has one"),
    ({"fill": {"z": 1}}, ValueError, "fill names 'z'"),
    ({"data": 3}, TypeError, "predict takes a Spark DataFrame, or Parquet files"),
]


def test_bad_input_is_an_error_before_the_job(data: Any) -> None:
    for arguments, error, message in BAD:
        given = {"data": data, "load": load_linear, "columns": "x", "outputs": "y float"}
        given |= arguments
        with pytest.raises(error, match=re.escape(message)):
            predict(given.pop("data"), given.pop("load"), **given)
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match=r"load cannot be pickled: .*lock"):
        predict(data, lambda: lock, columns="x")


def test_pysparks_function_loads_a_model_once(
    spark: Any, files: Path, tmp_path: Path, values: np.ndarray[Any, Any]
) -> None:
    from pyspark.sql.types import ArrayType, FloatType

    loads = tmp_path / "loads"

    def make() -> Any:
        with open(loads, "a") as file:
            file.write("loaded\n")
        model = load_linear()

        def function(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            with torch.inference_mode():
                found: np.ndarray[Any, Any] = model(torch.from_numpy(x.astype(np.float32))).numpy()
            return found

        return function

    kind = ArrayType(FloatType())
    options = {"return_type": kind, "batch_size": 64, "input_tensor_shapes": [[WIDTH]]}
    rows = spark.read.parquet(str(files)).repartition(8)
    score = predict_batch_udf(make, **options)
    found = rows.select("id", score("x").alias("y")).orderBy("id").collect()
    assert [row.id for row in found] == list(range(ROWS))
    y = np.array([row.y for row in found], np.float32)
    # Near zero, matrices of other sizes differ by more than a part in a million.
    np.testing.assert_allclose(y, expected(values), rtol=1e-6, atol=1e-6)
    assert 1 <= len(loads.read_text().splitlines()) <= 2
    with pytest.raises(TypeError, match="make_predict_fn must be a function, but is int"):
        predict_batch_udf(3, **options)  # type: ignore[arg-type]


def test_rows_of_a_stream(spark: Any, files: Path, values: np.ndarray[Any, Any]) -> None:
    schema = spark.read.parquet(str(files)).schema
    stream = spark.readStream.schema(schema).parquet(str(files))
    with pytest.raises(ValueError, match="A streaming DataFrame has no rows yet"):
        predict(stream, load_linear, columns="x")
    found = predict(stream, load_linear, columns="x", keep=["id"], outputs="y array<float>")
    query = (
        found.writeStream.format("memory").queryName("predicted").trigger(availableNow=True).start()
    )
    query.awaitTermination(120)
    rows = spark.table("predicted").orderBy("id").collect()
    y = np.array([row.y for row in rows], np.float32)
    # Near zero, matrices of other sizes differ by more than a part in a million.
    np.testing.assert_allclose(y, expected(values), rtol=1e-6, atol=1e-6)


IMPORTED_ONCE = """
import json, os, sys
from pyspark.sql import SparkSession

from distributor.data import predict, predict_batch_udf

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = spark.config("spark.python.daemon.module", "distributor.spark.daemon").getOrCreate()


def torch_is_there(batches):
    import os, sys
    import pyarrow as pa

    for batch in batches:
        yield pa.record_batch({"found": ["torch" in sys.modules], "daemon": [os.getppid()]})


def load():
    return lambda ids: ids * 2


rows = spark.range(10, numPartitions=1)
first = rows.mapInArrow(torch_is_there, "found boolean, daemon long").first()
doubled = predict(rows, load, columns="id", outputs="y int", keep=[]).collect()
again = rows.mapInArrow(torch_is_there, "found boolean, daemon long").first()
same = first.daemon == again.daemon
spark.stop()
ended = []
for use in (
    lambda: predict(rows, load, columns="id", outputs="y int"),
    lambda: predict_batch_udf(load, return_type="int", batch_size=2),
):
    try:
        use()
    except Exception as error:
        ended.append(f"{type(error).__name__}: {error}")
facts = {"first": first.found, "same": same, "y": [y for y, in doubled], "ended": ended}
print("FACTS " + json.dumps(facts))
"""


def test_workers_are_forked_from_a_process_that_has_imported_torch(
    run_driver: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    with relies_on("pyspark", "pyspark.daemon.manager", "pyspark.serve_workers"):
        facts = facts_in(run_driver(IMPORTED_ONCE))
    of_frame, of_function = facts.pop("ended")
    assert re.match("ApplicationEnded: The Spark application has ended.* make a new one", of_frame)
    assert "there is none: its session has been stopped. Make one" in of_function
    assert facts == {"first": True, "same": True, "y": [2 * at for at in range(10)]}
