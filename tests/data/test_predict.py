"""A model's outputs as columns of a DataFrame."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
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

from distributor.data import from_parquet, predict, predict_batch_udf
from distributor.data import prediction_task as shared_model
from distributor.data.outputs import to_arrow, type_of
from distributor.errors import UnpicklableError
from distributor.train import Checkpoint

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
    """Also if the model writes into its input, which changes no column."""

    def load() -> Any:
        linear = load_linear()
        return lambda batch: {
            "y": linear(batch["x"]),
            "twice": batch["x"].mul_(2),
            "minus": batch["id"].neg_(),
        }

    outputs = "y array<float>, twice array<float>, minus int"
    frame = predict(data, load, columns=["x", "id"], outputs=outputs, batch_size=64)
    assert frame.columns == ["id", "x", "text", "y", "twice", "minus"]
    assert len(frame.limit(3).collect()) == 3, "tasks that are not read to their end"
    rows = sorted(frame.collect(), key=lambda row: row.id)
    assert [(row.id, row.text, row.minus) for row in rows] == [
        (at, str(at), -at) for at in range(ROWS)
    ]
    x, y, twice = (
        np.array([row[name] for row in rows], np.float32) for name in ("x", "y", "twice")
    )
    assert np.array_equal(x, values)
    assert np.array_equal(twice, values * 2)
    # Matrices of other sizes may round otherwise.
    np.testing.assert_allclose(y, expected(values), rtol=1e-6)


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_types_are_found_and_columns_are_kept(data: Any) -> None:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import StructType

    def load() -> Any:
        def model(batch: dict[str, Any]) -> dict[str, Any]:
            total = batch["x"].sum(dim=1)
            return {
                "double id": batch["id"].numpy() * 2,
                "matrix": torch.stack([total, total], 1).reshape(-1, 1, 2),
                "parts": {
                    "id": batch["id"],
                    "of": {"text": batch["text"], "twice": 2 * batch["x"]},
                },
                "v": batch["x"],
            }

        return model

    frame = predict(data, load, keep=["x"])
    assert frame.dtypes == [
        ("x", "array<float>"),
        ("double id", "bigint"),
        ("matrix", "array<array<float>>"),
        ("parts", "struct<id:bigint,of:struct<text:string,twice:array<float>>>"),
        ("v", "array<float>"),
    ]
    outputs = StructType([*frame.schema[1:-1], *StructType().add("v", VectorUDT())])
    rows = predict(data, load, keep=["x"], outputs=outputs).where("parts.id < 10").collect()
    assert sorted(row.parts.id for row in rows) == list(range(10))
    for row in rows:
        assert row["double id"] == 2 * row.parts.id
        assert np.shape(row["matrix"]) == (1, 2)
        assert row.v.toArray().tolist() == row.x
        assert row.parts.of.text == str(row.parts.id)
        assert row.parts.of.twice == [2 * value for value in row.x]


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_an_executor_loads_a_model_once(data: Any, tmp_path: Path) -> None:
    loads = tmp_path / "loads"

    def load() -> torch.nn.Module:
        import os

        with open(loads, "a") as file:
            file.write(f"{os.environ['SPARK_LOCAL_DIRS']}\n")

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.full((1000,), 2.0))

            def forward(self, batch: torch.Tensor) -> dict[str, Any]:
                begin = self.weight.data_ptr()
                with open("/proc/self/maps") as file:
                    maps = [line.split() for line in file if "distributor-models" in line]
                bounds = [[int(each, 16) for each in line[0].split("-")] for line in maps]
                is_shared = any(first <= begin < last for first, last in bounds)
                state = f"{'shared' if is_shared else 'own'} {self.training}"
                return {"y": batch * self.weight[0].long(), "state": [state] * len(batch)}

        return Model()

    outputs = "y bigint, state string"
    frame = predict(data, load, columns="id", keep=["id"], outputs=outputs, batch_size=10)
    rows = [row for _ in range(2) for row in frame.collect()]
    assert sorted(row.y for row in rows) == sorted(2 * n for n in [*range(ROWS)] * 2)
    assert {row.state for row in rows} == {"shared False"}
    executors = loads.read_text().splitlines()
    assert len(executors) == len(set(executors)) <= 2


def test_code_that_changes_is_used_as_it_is_now(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of a notebook, and the user's modules, also those that a function imports."""

    class Net(torch.nn.Module):
        bias = 0

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch + self.bias

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which could hide the change
    (tmp_path / "my_offsets.py").write_text("OFFSET = 0.5")
    rows = spark.range(2).coalesce(1)
    for factor, bias in ((2, 0), (30, 100)):
        Net.bias = bias
        (tmp_path / "my_models.py").write_text(f"def scaled(ids): return {factor} * ids")
        monkeypatch.delitem(sys.modules, "my_models", raising=False)
        scaled = importlib.import_module("my_models").scaled

        def load(scaled: Any = scaled) -> Any:
            from my_offsets import OFFSET

            net = Net()
            return lambda ids: net(scaled(ids)) + OFFSET

        found = predict(rows, load, columns="id", outputs="y double", keep=[]).collect()
        assert sorted(row.y for row in found) == [bias + 0.5, factor + bias + 0.5]


def test_killed_tasks_cost_no_row(spark: Any, tmp_path: Path) -> None:
    """One is killed while it loads the model from a checkpoint, and one while it uses it."""
    torch.save(torch.tensor(2), tmp_path / "factor.pt")

    def die_once(name: str) -> None:
        import contextlib
        import os
        import signal

        with contextlib.suppress(FileExistsError), open(tmp_path / name, "x"):
            os.kill(os.getpid(), signal.SIGKILL)

    def load(folder: str) -> torch.nn.Module:
        die_once("loading")
        factor = torch.load(f"{folder}/factor.pt")

        class Model(torch.nn.Module):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                if 500 in ids:
                    die_once("using")
                return ids * factor

        return Model()

    rows = spark.range(0, ROWS, 1, 8)
    options: dict[str, Any] = {"checkpoint": SimpleNamespace(checkpoint=Checkpoint(str(tmp_path)))}
    options |= {"columns": "id", "outputs": "y long", "keep": ["id"], "batch_size": 50}
    found = predict(rows, load, **options)
    assert {row.id: row.y for row in found.collect()} == {at: 2 * at for at in range(ROWS)}
    assert {"loading", "using"} <= {path.name for path in tmp_path.iterdir()}


STRUCT = pa.struct([("a", pa.int64())])
OUTPUTS: list[tuple[Any, pa.DataType, list[Any]]] = [  # their types, and the rows
    (["a", None], pa.string(), ["a", None]),
    ([("a", None), None], pa.list_(pa.string()), [["a", None], None]),
    (np.array([["a", None]] * 2, object), pa.list_(pa.string()), [["a", None]] * 2),
    (np.ma.masked_array([1, 2], [False, True]), pa.int64(), [1, None]),
    ([torch.tensor(1.5), torch.tensor(2)], pa.float64(), [1.5, 2.0]),
    ([torch.arange(2), torch.arange(0)], pa.list_(pa.int64()), [[0, 1], []]),
    (torch.ones(2, 1, dtype=torch.bfloat16), pa.list_(pa.float32()), [[1.0], [1.0]]),
    (np.ones((2, 0), np.uint8), pa.list_(pa.int16()), [[], []]),
]
WITHOUT_TYPE: list[tuple[Any, str]] = [
    (None, "Output 'y' is of the type NoneType. A model must return"),
    ([1, "a"], "Output 'y' has values of no common type"),
    ([[], [None]], "Output 'y' has no value in the first rows but None and empty lists"),
]
UNFIT: list[tuple[Any, pa.DataType, str]] = [
    (["a"], pa.string(), "Output 'y' has 1 values for 2 rows"),
    (["a", "b"], pa.list_(pa.string()), "Output 'y' does not fit list<"),
    ([1, 1.5], pa.int64(), "Output 'y' does not fit int64"),
    ({"b": torch.ones(2)}, STRUCT, "Output 'y' is a dict of b"),
    ({"a": torch.ones(3)}, STRUCT, "Output 'y.a' has 3 values for 2 rows"),
]


def test_outputs_of_each_type() -> None:
    for output, kind, rows in OUTPUTS:
        assert type_of(output, "y") == kind
        assert to_arrow(output, kind, 2, "y").to_pylist() == rows
    for output, message in WITHOUT_TYPE:
        with pytest.raises(TypeError, match=re.escape(message)):
            type_of(output, "y")
    for output, kind, message in UNFIT:
        with pytest.raises(ValueError, match=re.escape(message)):
            to_arrow(output, kind, 2, "y")
    matrix = torch.arange(6.0).reshape(2, 3).T
    column = to_arrow(matrix, pa.list_(pa.float32()), 3, "y")
    matrix.zero_()
    assert column.to_pylist() == [[0, 3], [1, 4], [2, 5]], "it does not use the model's memory"


TEXTS = pa.dictionary(pa.int32(), pa.string())
COLUMNS = {  # of a Parquet file
    "uint32": pa.array([2**32 - 1, None], pa.uint32()),
    "uint64": pa.array([2**64 - 1, None], pa.uint64()),
    "milliseconds": pa.array([1, None], pa.timestamp("ms")),
    "duration": pa.array([5, None], pa.duration("ms")),
    "dictionary": pa.array(["x", None], TEXTS),
    "fixed-size list": pa.array([[1.5, 2.5], [3.5, 4.5]], pa.list_(pa.float32(), 2)),
    "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.uint8())),
    "structs": pa.array([[{"a": 1, "b": [datetime(2024, 1, 1)]}], None]),
    "decimal": pa.array([Decimal("1.5"), None], pa.decimal256(38, 2)),
    "nulls": pa.nulls(2),
}
FOLDERS = {  # values in their names, which become columns
    "long": ["1", str(2**40)],
    "double": ["0.5", "1"],
    "long and double": ["0.5", str(2**40)],
    "text": ["x", "a b"],
    "date": ["2024-01-01", "1500-01-01"],
    "instant": ["2024-01-01 10:00:00", "2024-07-01 10:00:00"],
    "hexadecimal": ["0x10", "0x11"],
    "null": ["1", "__HIVE_DEFAULT_PARTITION__"],
}
SPARKS = (  # SQL of columns that Spark writes
    "timestamp'1500-01-01 10:00:00' t",
    "timestamp_ntz'9999-01-01 10:00:00' ntz",
    "named_struct('t', timestamp'1500-01-01 10:00:00', 'd', date'1500-01-01') s",
    "interval '1 02:03:04' day to second i",
    "map('a', array(1, null)) m",
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
        paths.append(tmp_path / "vectors")
        spark.createDataFrame(vectors, ["v", "f"]).write.parquet(str(paths[-1]))
        for path in paths:
            expected = spark.read.parquet(str(path))
            found = predict(from_parquet(path), lambda: lambda v: v, columns="v", outputs="p long")
            assert found.drop("p").dtypes == expected.dtypes
            rows = [sorted(frame.collect(), key=lambda row: row.v) for frame in (found, expected)]
            assert [row[:-1] for row in rows[0]] == [tuple(row) for row in rows[1]]
    finally:
        spark.conf.unset(timezone)
        spark.conf.unset(kind)


def test_a_type_that_spark_does_not_have_is_named_if_it_is_used(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table({"v": [1], "c": pa.nulls(1, pa.time32("s"))}), path)
    rows = spark.range(1).selectExpr("id v", "interval '1' year c")
    for data in (from_parquet(path), rows):
        settings: dict[str, Any] = {"outputs": "p long"}
        found = predict(data, lambda: lambda v: v, columns="v", keep=["v"], **settings)
        assert [name for name, _ in found.dtypes] == ["v", "p"]
        for asked in ({"columns": "v"}, {"columns": "c", "keep": []}):
            with pytest.raises(TypeError, match=r"'c' of .* has the type .*(Leave it|Cast it, or)"):
                predict(data, lambda: lambda v: v, **asked, **settings)


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
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense([1.0, 2.0]), 1), (Vectors.sparse(2, {1: 3.0}), None)]
    frame = spark.createDataFrame(rows, ["v.w", "n"]).selectExpr(
        "*", *(f"{sql} t{at}" for at, (sql, *_) in enumerate(INPUTS))
    )
    outputs = ", ".join(["y double", *(f"p{at} {kind}" for at, (_, kind, _) in enumerate(INPUTS))])

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        y = batch.pop("v.w").sum(1) + batch.pop("n")
        return {"y": y, **batch}

    def load() -> Any:
        return lambda batch: {name.replace("t", "p"): value for name, value in batch.items()}

    settings: dict[str, Any] = {"collate_fn": collate, "fill": -1, "outputs": outputs}
    found = predict(frame, load, keep=["v.w"], **settings).collect()
    assert sorted(row.y for row in found) == [2.0, 4.0]
    assert {type(row["v.w"]).__name__ for row in found} == {"DenseVector", "SparseVector"}
    assert all(list(row)[2:] == [value for *_, value in INPUTS] for row in found)


@pytest.mark.slow(ci=True)  # Spark runs the task four times, each in a new worker
def test_an_error_shows_the_users_lines(spark: Any) -> None:
    def fail(rows: Any) -> Any:
        return rows["no such column"]  # the line of the user

    def load() -> Any:
        return lambda batch: fail(batch)

    rows = spark.range(2).coalesce(1)
    with pytest.raises(Exception, match=r"KeyError for rows 0 to 1 .*: 'no such column'") as caught:
        predict(rows, load, columns=["id"], outputs="y float").collect()
    shown = str(caught.value)
    assert 'return rows["no such column"]  # the line of the user' in shown
    assert "/distributor/data/" not in shown.partition("KeyError")[2]
    assert "java" not in shown


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"columns": "z"}, ValueError, "columns has 'z', which is no column. The columns are id, x"),
    ({"outputs": "y"}, ValueError, "outputs is 'y', which is no schema. Write names and types"),
    ({"outputs": "y map<int,int>"}, ValueError, "outputs has 'y' of the type map<int32, int32>"),
    ({"outputs": "id int"}, ValueError, "'id' is an output, and also a column of the rows"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, but is 0"),
    ({"load": torch.nn.ReLU()}, TypeError, "load must be a function that returns the model, but"),
    ({"data": 3}, TypeError, "predict takes a Spark DataFrame, or Parquet files"),
]


@pytest.mark.parametrize("data", ["files"], indirect=True)
def test_bad_input_is_an_error_before_the_job(data: Any, spark: Any) -> None:
    for arguments, error, message in BAD:
        given = {"data": data, "load": load_linear, "columns": "x", "outputs": "y float"}
        given |= arguments
        with pytest.raises(error, match=re.escape(message)):
            predict(given.pop("data"), given.pop("load"), **given)
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match=r"load cannot be pickled: .*lock"):
        predict(data, lambda: lock, columns="x")
    with pytest.raises(ValueError, match="A streaming DataFrame has no rows yet"):
        predict(spark.readStream.format("rate").load(), load_linear, columns="value")


@pytest.mark.slow
def test_pysparks_function_loads_a_model_once(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql.types import ArrayType, DoubleType

    loads = tmp_path / "loads"

    def make() -> Any:
        with open(loads, "a") as file:
            file.write("loaded\n")
        factor = torch.full((2,), 2.0)
        return lambda x: (torch.tensor(x) * factor).numpy()

    options = {"return_type": ArrayType(DoubleType()), "input_tensor_shapes": [[2]]}
    double = predict_batch_udf(make, batch_size=64, **options)
    rows = spark.range(0, ROWS, 1, 8).selectExpr("id", "array(double(id), 0.5D) x")
    found = rows.select("id", double("x").alias("y")).orderBy("id").collect()
    assert [tuple(row) for row in found] == [(at, [2 * at, 1.0]) for at in range(ROWS)]
    assert 1 <= len(loads.read_text().splitlines()) <= 2


IMPORTED_ONCE = """
import json, os, sys
from pyspark.sql import SparkSession

from distributor.data import predict

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = spark.config("spark.python.daemon.module", "distributor.spark.daemon").getOrCreate()


def torch_is_there(batches):
    import sys
    import pyarrow as pa

    for batch in batches:
        yield pa.record_batch({"found": ["torch" in sys.modules]})


rows = spark.range(10, numPartitions=1)
found = rows.mapInArrow(torch_is_there, "found boolean").first().found
doubled = predict(rows, lambda: lambda ids: ids * 2, columns="id", outputs="y int", keep=[])
print("FACTS " + json.dumps([found, [y for y, in doubled.collect()]]))
"""


@pytest.mark.slow
def test_workers_are_forked_from_a_process_that_has_imported_torch(
    run_driver: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    with relies_on("pyspark", "pyspark.daemon.manager", "pyspark.serve_workers"):
        facts = facts_in(run_driver(IMPORTED_ONCE))
    assert facts == [True, [2 * at for at in range(10)]]


def test_a_model_waits_only_for_the_worker_that_loads_it_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_model, "_folder", lambda: tmp_path)
    monkeypatch.setattr(shared_model, "LOADING_SECONDS", 0.2)
    loading, loaded = threading.Event(), threading.Event()

    def load() -> Any:
        loading.set()
        loaded.wait(20)
        return torch.ones(1)

    first = threading.Thread(target=shared_model.load_once, args=("first", load))
    first.start()
    assert loading.wait(60)
    assert shared_model.load_once("second", lambda: torch.zeros(1)).item() == 0
    with pytest.raises(TimeoutError, match=r"loading the model for more than 0\.2 s"):
        shared_model.load_once("first", load)
    loaded.set()
    first.join(60)
    assert shared_model.load_once("first", torch.empty).item() == 1
