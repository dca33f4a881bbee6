"""A model's outputs as columns of a DataFrame."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import needs_java

from distributor.data import from_parquet, predict
from distributor.errors import UnpicklableError

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


def test_several_models_are_loaded_once_in_each_worker(data: Any, spark: Any) -> None:
    def load_of(offset: int) -> Any:
        def load() -> Any:
            import uuid

            identity = f"{offset} {uuid.uuid4().hex}"
            return lambda batch: {"model": [identity] * len(batch["id"]), "y": batch["id"] + offset}

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


def test_rows_of_an_early_end(data: Any) -> None:
    """A task that is not read to its end leaves no thread that hinders the next."""
    frame = predict(data, load_linear, columns="x", outputs="y array<float>", keep=["id"])
    assert len(frame.limit(3).collect()) == 3
    assert frame.count() == ROWS


def test_a_task_that_fails_names_the_rows(data: Any) -> None:
    def load() -> Any:
        return lambda batch: torch.zeros(len(batch["id"]) - int(700 in batch["id"]))

    frame = predict(data, load, columns=["id"], outputs="y float", batch_size=50)
    with pytest.raises(Exception, match=r"ValueError for rows .* of partition") as caught:
        frame.collect()
    assert re.search(r"Output 'y' has \d+ values for \d+ rows", str(caught.value))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"columns": "z"}, ValueError, "columns has 'z', which is no column. The columns are id, x"),
    ({"keep": ["z"]}, ValueError, "keep has 'z', which is no column"),
    ({"keep": ["id", "id"]}, ValueError, "Column 'id' is there twice"),
    ({"outputs": "y"}, ValueError, "outputs is 'y', in which 'y' is no name with a type of"),
    ({"outputs": "y map<int>"}, ValueError, "'y map<int>' is no name with a type"),
    ({"outputs": "y int, y int"}, ValueError, "'y' is there twice"),
    ({"outputs": "id int"}, ValueError, "'id' is an output, and also a column of the rows"),
    ({"columns": []}, ValueError, "columns is empty: name at least one column"),
    ({"keep": "id"}, TypeError, "keep must be a list of names, but is the string 'id'"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, but is 0"),
    ({"load": 3}, TypeError, "load must be a function, but is int"),
    ({"collate_fn": 3}, TypeError, "collate_fn must be a function, but is int"),
    ({"device": "no"}, RuntimeError, "no"),
    ({"fill": {"z": 1}}, ValueError, "fill names 'z'"),
    ({"data": 3}, TypeError, "predict takes a Spark DataFrame, or Parquet files"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_input_is_an_error_before_the_job(
    data: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"data": data, "load": load_linear, "columns": "x", "outputs": "y float", **arguments}
    with pytest.raises(error, match=re.escape(message)):
        predict(given.pop("data"), given.pop("load"), **given)


def test_what_cannot_be_sent_is_named(data: Any) -> None:
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match=r"load cannot be sent to executors: .*lock"):
        predict(data, lambda: lock, columns="x")


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
    np.testing.assert_allclose(y, expected(values), rtol=1e-6)
