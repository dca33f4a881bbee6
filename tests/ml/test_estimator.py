"""`TorchEstimator` and `TorchModel`, as stages of Spark ML."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from conftest import facts_in, needs_java
from torch.nn.functional import cross_entropy

from distributor.ml import TorchEstimator, TorchModel
from distributor.ml.training import Predictor, meaning_for
from distributor.train import Result

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.spark, needs_java]
ROWS = 300
STEPS = 5
"""The steps of an epoch of the fit that fails."""


class Net(torch.nn.Module):
    """A class that a new process cannot import."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(2, 16)
        self.out = torch.nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.relu(self.hidden(x)))
        return found


def classifier(**arguments: Any) -> TorchEstimator:
    defaults = {
        "module": partial(Net, 2),
        "loss": torch.nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam,
        "stepSize": 0.02,
        "local_mode": True,
        "preload": ["torch._dynamo"],  # which each rank's optimizer would import
    }
    return TorchEstimator(**{**defaults, **arguments})


def regressor(**arguments: Any) -> TorchEstimator:
    return classifier(**{"module": Net, "loss": torch.nn.MSELoss(), **arguments})


@pytest.fixture(scope="module")
def file(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write points with a class and a number to learn into one file."""
    path = str(tmp_path_factory.mktemp("numbers"))
    rows = spark.range(ROWS, numPartitions=1).selectExpr("id", "20 * rand(1) a", "rand(2) b")
    rows = rows.selectExpr("*", "double(a > 10) kind", "float(a / 10 - b) label")
    rows.selectExpr("*", "array(a / 20, b) x").write.mode("overwrite").parquet(path)
    return path


@pytest.fixture(scope="module")
def numbers(spark: Any, file: str) -> Any:
    return spark.read.parquet(file).cache()


@pytest.fixture(scope="module")
def points(numbers: Any) -> Any:
    """Return the points as vectors."""
    from pyspark.ml.feature import VectorAssembler

    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(numbers)


def accuracy(predictions: Any, label: str = "kind") -> float:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    evaluator = MulticlassClassificationEvaluator(metricName="accuracy", labelCol=label)
    return float(evaluator.evaluate(predictions))


def predictions_of(frame: Any) -> list[float]:
    return [row.prediction for row in frame.orderBy("id").collect()]


def test_ranks_on_executors_learn_classes(points: Any) -> None:
    torch.manual_seed(0)
    module = Net(2)
    before = [each.clone() for each in module.parameters()]
    columns = {"labelCol": "kind", "probabilityCol": "chances"}
    estimator = classifier(module=module, maxIter=20, num_processes=2, local_mode=False, **columns)
    model = estimator.fit(points)

    assert all(torch.equal(*each) for each in zip(before, module.parameters(), strict=True))
    assert type(model.module) is Net
    predictions = model.transform(points)
    assert predictions.schema["prediction"].dataType.typeName() == "double"
    assert accuracy(predictions) > 0.95
    row = predictions.first()
    assert row.prediction == row.chances.argmax()
    assert row.chances.sum() == pytest.approx(1)


def test_losses_determine_what_outputs_mean() -> None:
    for loss, output, prediction, probability in (
        (torch.nn.CrossEntropyLoss(), [math.log(3), 0], 0, [0.75, 0.25]),
        (partial(cross_entropy, reduction="sum"), [0, math.log(3)], 1, [0.25, 0.75]),
        (torch.nn.NLLLoss(), [math.log(0.25), math.log(0.75)], 1, [0.25, 0.75]),
        (torch.nn.BCEWithLogitsLoss(), [-math.log(3)], 0, [0.75, 0.25]),
        (torch.nn.BCELoss(), [0.75], 1, [0.25, 0.75]),
    ):
        model = Predictor(torch.nn.Identity(), meaning_for(loss), "guess", "chances")
        found = model(torch.tensor([output, output]))
        assert found["guess"].tolist() == [prediction] * 2
        assert found["chances"].tolist() == [pytest.approx(probability)] * 2


class FailsOnce(Net):
    """Ends the process in the third epoch of the first attempt."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.2)
        self.steps = 0
        self.marker = marker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps > 2 * STEPS and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(self.drop(x))


def test_a_killed_fit_continues_at_the_epoch(numbers: Any, tmp_path: Path) -> None:
    unbroken, killed = str(tmp_path), str(tmp_path / "killed")
    storage = tmp_path / "storage"
    arguments = {"featuresCol": "x", "batchSize": -(-ROWS // STEPS), "maxIter": 4}
    estimator = regressor(module=partial(FailsOnce, unbroken), **arguments)
    expected = estimator.fit(numbers).module.state_dict()
    estimator = regressor(
        module=partial(FailsOnce, killed), **arguments, storage_path=storage, max_failures=1
    )
    found = estimator.fit(numbers).module

    assert Path(killed).exists(), "a rank was killed"
    assert found.steps == 2 * STEPS, "of the last two epochs"
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    [run] = storage.iterdir()
    epochs = [report.metrics["epoch"] for report in Result.from_path(run).reports]
    assert epochs == [0, 1, 2, 3]


def train_in_full(config: dict[str, Any]) -> torch.nn.Module | None:
    from distributor import train
    from distributor.train.torch import prepare_model

    torch.manual_seed(config["seed"])
    model = prepare_model(Net(2))
    optimizer = torch.optim.SGD(model.parameters(), config["stepSize"], config["momentum"])
    shard = train.get_dataset_shard("train")
    for _ in range(config["maxIter"]):
        for batch in shard.iter_torch_batches(batch_size=config["batchSize"]):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch["x"].float()), batch["kind"].long())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model if train.get_context().get_world_rank() == 0 else None


def test_a_training_function_returns_the_module(numbers: Any) -> None:
    estimator = TorchEstimator(
        train=train_in_full,
        predict=lambda output: output.argmax(dim=1),
        featuresCol="x",
        config={"momentum": 0.9},
        stepSize=0.1,
        num_processes=2,
        local_mode=True,
    )
    model = estimator.fit(numbers, {estimator.maxIter: 6})

    assert type(model.module) is Net, "without DistributedDataParallel"
    assert accuracy(model.transform(numbers)) > 0.95
    with pytest.raises(TypeError, match=r"train must return the trained module on rank 0.* type"):
        TorchEstimator(train=lambda: Net, local_mode=True).fit(numbers)


def test_params(numbers: Any) -> None:
    estimator = regressor(featuresCol="x", maxIter=1)
    assert {each.name for each in estimator.params} == {
        *("batchSize", "config", "featuresCol", "labelCol", "maxIter", "predictionCol"),
        *("probabilityCol", "seed", "stepSize"),
    }
    assert estimator.setStepSize(0.02) is estimator
    extra = {estimator.maxIter: 3, estimator.predictionCol: "guess"}
    copied = estimator.copy(extra)
    assert (copied.getMaxIter(), estimator.getMaxIter(), copied.uid) == (3, 1, estimator.uid)

    one, other = estimator.fit(numbers, [extra, {estimator.seed: 5}])
    assert (one.uid, one.getMaxIter(), one.getSeed()) == (estimator.uid, 3, 0)
    assert one.transform(numbers).columns[-1] == "guess"
    [[a], [b]] = ([m.module.state_dict()["out.bias"].tolist()] for m in (one, other))
    assert a != b


LOADS = """
import json, sys
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.tuning import CrossValidatorModel
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
numbers, *paths = sys.argv[1:]
models = [PipelineModel.load(paths[0]), CrossValidatorModel.load(paths[1])]
frames = [each.transform(spark.read.parquet(numbers)) for each in models]
found = [[row.prediction for row in frame.orderBy("id").collect()] for frame in frames]
print("FACTS " + json.dumps(found))
"""
"""Loads in a new process what the next test has saved."""


@pytest.mark.slow
def test_a_cross_validated_pipeline_is_saved_and_loaded(
    numbers: Any,
    file: str,
    tmp_path: Path,
    run_driver: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Two fits at a time, of which one waits for the slots of the other."""
    from pyspark.ml import Pipeline
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.feature import StandardScaler, VectorAssembler
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    on_executors = {"num_processes": 4, "local_mode": False}
    estimator = regressor(featuresCol="scaled", maxIter=8, batchSize=8, **on_executors)
    stages = [
        VectorAssembler(inputCols=["a", "b"], outputCol="features"),
        StandardScaler(inputCol="features", outputCol="scaled", withMean=True),
        estimator,
    ]
    validator = CrossValidator(
        estimator=Pipeline(stages=stages),
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.stepSize, [1e-5, 0.02]).build(),
        evaluator=RegressionEvaluator(metricName="r2"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    found = validator.fit(numbers)

    assert found.avgMetrics.index(max(found.avgMetrics)) == 1, found.avgMetrics
    model = found.bestModel
    assert (model.stages[2].getStepSize(), model.stages[2].getMaxIter()) == (0.02, 8)
    saved = {"model": model, "best": found}
    for name, each in saved.items():
        each.write().overwrite().save(str(tmp_path / name))
    loaded = facts_in(run_driver(LOADS, file, *(str(tmp_path / name) for name in saved)))
    assert loaded == [predictions_of(model.transform(numbers))] * 2, "bit for bit"


def test_stages_are_saved_with_their_params_and_functions(points: Any, tmp_path: Path) -> None:
    estimator = classifier(labelCol="kind", maxIter=2, config={"a": [1]}, timeout=100)
    model = TorchModel(Net(2), lambda output: output.amax(dim=1), batchSize=7)
    loaded = []
    for stage in (estimator, model):
        path = str(tmp_path / f"{type(stage).__name__} a%20b+ü")
        stage.save(path)
        with pytest.raises(Exception, match=r"already exists|ALREADY_EXISTS"):
            stage.save(path)
        again = type(stage).load(path)
        assert again.uid == stage.uid
        assert again.extractParamMap() == stage.extractParamMap()
        assert str(again.parts()["module"]) == str(stage.parts()["module"])
        loaded.append(again)
    assert loaded[0].parts()["timeout"] == 100
    one, other = (predictions_of(each.transform(points)) for each in (model, loaded[1]))
    assert one == other


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"train": lambda: None}, ValueError, "either module, loss and optimizer, or train"),
    ({"loss": None}, ValueError, "loss is missing"),
    ({"loss": torch.nn.MSELoss}, TypeError, r"is the class MSELoss: .* MSELoss\(\)"),
    ({"batchSize": 0}, ValueError, "batchSize must be at least 1, but is 0"),
    ({"config": {"net": Net}}, TypeError, "config"),
    ({"num_proceses": 2}, TypeError, r"TorchEstimator\(\) got .* 'num_processes'"),
    ({"epochs": 2}, TypeError, "mean 'maxIter'"),
    ({"featuresCol": ["a", "b"]}, TypeError, "featuresCol must be .*VectorAssembler"),
    (
        {"optimizer": torch.optim.SGD(Net().parameters(), lr=0.1, momentum=0.5)},
        TypeError,
        r"lambda parameters: torch.optim.SGD\(parameters, lr=0.1, momentum=0.5\)",
    ),
]
WRONG_COLUMNS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"featuresCol": "y"}, ValueError, "featuresCol is 'y', which is no column.* a, b,"),
    ({"featuresCol": "a"}, TypeError, "featuresCol is 'a', a column of type double"),
    ({"config": {"seed": 1}}, ValueError, "config has 'seed', which is a Param"),
    ({"probabilityCol": "p"}, ValueError, "probabilityCol is 'p', but .* losses of classes"),
]


def test_what_is_refused_before_a_fit(numbers: Any) -> None:
    for arguments, error, message in WRONG:
        with pytest.raises(error, match=message):
            classifier(**arguments)
    for arguments, error, message in WRONG_COLUMNS:
        with pytest.raises(error, match=message):
            regressor(**{"featuresCol": "x", **arguments}).fit(numbers)
    with pytest.raises(ValueError, match="The DataFrame dataset has no rows"):
        regressor(featuresCol="x").fit(numbers.limit(0))
    model = TorchModel(Net(), featuresCol="x")
    with pytest.raises(ValueError, match="predictionCol is 'a', a column that"):
        model.transform(numbers, {model.predictionCol: "a"})


@pytest.mark.slow
def test_labels_and_outputs_that_do_not_match(numbers: Any) -> None:
    with pytest.raises(ValueError, match="Column 'label' has labels that are no indices"):
        classifier(featuresCol="x").fit(numbers)
    with pytest.raises(ValueError, match=r"shape \(32, 2\) for 32 labels of column 'label'"):
        regressor(module=partial(Net, 2), featuresCol="x").fit(numbers)
