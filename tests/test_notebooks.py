"""The notebooks run from top to bottom, some on a cluster, and are saved as they ran."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_java
from support.notebooks import NAMES, NOTEBOOKS, Place, place_for_notebooks, run_here

from distributor.train import Result

nbformat = pytest.importorskip("nbformat")
OF_A_MACHINE = re.compile(r"(?<![\w.:/#])/\w+/|\b(?!127\.0\.0\.1\b)\d+\.\d+\.\d+\.\d+\b")
"""A path from the root, or an address other than the tracking server's."""


class Ran:
    """What a notebook shows below its cells."""

    def __init__(self, notebook: Any) -> None:
        self.code = [cell for cell in notebook.cells if cell.cell_type == "code"]

    def value(self, source: str) -> Any:
        """Return the value shown below the cell that has a line."""
        [output] = self._outputs(source, "execute_result")
        return ast.literal_eval(output.data["text/plain"])

    def table(self, source: str) -> dict[str, dict[str, float]]:
        """Return the numbers, by row, of the table shown below the cell that has a line."""
        [output] = self._outputs(source, "execute_result")
        lines = output.data["text/plain"].splitlines()
        columns, *rows = (re.split(r"\s{2,}", line.strip()) for line in lines)
        return {row[0]: dict(zip(columns, map(float, row[1:]), strict=True)) for row in rows}

    def lines(self, source: str) -> list[str]:
        """Return the lines printed below the cell that has a line."""
        streams = self._outputs(source, "stream")
        return [line for output in streams for line in output.text.splitlines()]

    def errors(self) -> list[str]:
        """Name the errors that are shown."""
        outputs = [output for cell in self.code for output in cell.outputs]
        return [output.ename for output in outputs if output.output_type == "error"]

    def _outputs(self, source: str, kind: str) -> list[Any]:
        [cell] = [cell for cell in self.code if source in cell.source.splitlines()]
        return [output for output in cell.outputs if output.output_type == kind]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Start a cluster and a tracking server."""
    for name in ("ipykernel", "matplotlib", "mlflow", "mlxtend", "nbclient"):
        pytest.importorskip(name)
    with place_for_notebooks(tmp_path_factory.mktemp("notebooks")) as place:
        yield place


@pytest.mark.slow(ci=True)
@pytest.mark.spark
@needs_java
def test_the_walkthrough(place: Place) -> None:
    """Train alone, on two local ranks, and on two executors of a standalone cluster."""
    from mlflow import MlflowClient

    ran = Ran(place.run("walkthrough"))

    client = MlflowClient(place.uri)
    experiment = client.get_experiment_by_name("walkthrough")
    runs = client.search_runs([experiment.experiment_id], order_by=["start_time"])
    assert [run.info.run_name for run in runs] == ["alone", "local mode", "cluster mode"]
    assert [run.info.status for run in runs] == ["FINISHED"] * 3
    assert [run.data.tags.get("distributor.mode") for run in runs] == [None, "local", "cluster"]
    assert all(run.data.metrics["accuracy"] > 0.85 for run in runs)
    for mode in ("local", "cluster"):
        lines = ran.lines(f'with mlflow.start_run(run_name="{mode} mode") as run:')
        shown = [line.partition(": ")[0] for line in lines if "63 steps" in line]
        assert sorted(shown) == [
            f"[{rank}] epoch {epoch}" for rank in (0, 1) for epoch in (1, 2, 3)
        ], "each rank has its share of the 4,000 digits"
    assert ran.value("torch.equal(predict(loaded), predict(model))") is True
    assert ran.errors() == []


@pytest.mark.slow
@pytest.mark.spark
@needs_java
@pytest.mark.timeout(1800)
def test_the_other_notebooks_with_spark(place: Place) -> None:
    ran = Ran(place.run("serverless", **{"spark.master": "local[2]"}))
    nodes = [{"rank": rank, "local": rank, "node": 0} for rank in (0, 1)]
    assert ran.value('introduce.distributed("hello")') == nodes
    assert ran.value("train_on_cluster.distributed(epochs=20)")[0] < 0.8
    assert ran.value("future.cancel(), future.cancelled()") == (True, True)
    assert ran.value("failed") == [0]
    assert ran.errors() == ["ZeroDivisionError"]

    ran = Ran(place.run("dataframes"))
    accuracies = ran.value('accuracies["TorchTrainer"] = result.metrics["accuracy"]')
    in_spark, on_ranks = ran.value(
        'float(scores["correct"].sum() / scores["rows"].sum()), trained["accuracy"]'
    )
    assert {*accuracies.values(), in_spark} == {on_ranks}
    assert on_ranks > 0.88
    assert ran.errors() == []

    ran = Ran(place.run("estimator"))
    accuracy = ran.value("accuracy")
    assert accuracy > 0.88
    assert ran.value("loaded, loaded == accuracy") == (accuracy, True)
    assert ran.errors() == []

    ran = Ran(place.run("lora"))
    assert "[0] continues from checkpoint-40" in ran.lines(
        "losses = distributor.run(fine_tune, rows)"
    )
    steps, is_learned = ran.value("list(losses), losses[90] < losses[10]")
    assert steps == list(range(10, 91, 10))
    assert is_learned is True
    assert ran.errors() == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebooks_without_spark(tmp_path: Path) -> None:
    """Resume FSDP2 after a rank is lost, then on one rank; compare DDP and FSDP."""
    for module in ("ipykernel", "matplotlib", "mlxtend", "nbclient"):
        pytest.importorskip(module)
    ran = Ran(run_here("fsdp2", tmp_path / "fsdp2"))
    shown = ran.lines('result = trainer("digits", train_func, config=config).fit()')
    goes_on = ["[0] killed", "[0] goes on from checkpoint_000000 with epoch 1"]
    assert [line for line in shown if line.startswith("[0]")] == goes_on
    assert "[0] goes on from checkpoint_000005 with epoch 6" in ran.lines("longer = trainer(")
    longer = Result.from_path(tmp_path / "fsdp2" / "results" / "longer")
    assert [report.world_size for report in longer.reports] == [1, 1]
    assert longer.reports[-1].metrics["accuracy"] > 0.8
    assert ran.errors() == []

    ran = Ran(run_here("fsdp", tmp_path / "fsdp"))
    rows = ran.table("table = pandas.DataFrame(rows).T")
    ddp, fsdp, in_units = (rows[way] for way in ("DDP", "FSDP", "FSDP in units"))
    assert ddp["accuracy"] > 0.8
    assert ddp["peak MB"] > fsdp["peak MB"] > in_units["peak MB"]
    assert ran.errors() == []


@pytest.mark.slow(ci=True)
def test_the_loss_of_a_rank(tmp_path: Path) -> None:
    """Kill a rank: the others make all steps in their processes, and another takes its place."""
    for module in ("ipykernel", "matplotlib", "nbclient", "pandas", "sklearn"):
        pytest.importorskip(module)
    ran = Ran(run_here("recovery", tmp_path / "recovery"))
    weights = "len(values), all(torch.equal(each, weights[0]) for each in weights)"
    assert ran.value(weights) == (3, True)
    assert ran.value("[each == list(range(1, steps + 1)) for each in made]") == [True, True]
    assert ran.value("(found == test_labels).double().mean().item()") > 0.9
    assert ran.errors() == []


@pytest.mark.slow
def test_the_study(tmp_path: Path) -> None:
    """Search with trials of two ranks, prune some, and load the best trial's model."""
    for module in ("ipykernel", "matplotlib", "nbclient", "optuna", "sklearn"):
        pytest.importorskip(module)
    ran = Ran(run_here("study", tmp_path / "study"))
    value, params = ran.value("study.best_value, study.best_params")
    assert value > 0.95
    assert set(params) == {"lr", "width", "dropout", "batch_size"}
    epochs, unpruned = ran.value("epochs, TRIALS * EPOCHS")
    assert epochs < unpruned
    assert ran.value("accuracy(model), accuracy(model) == study.best_value") == (value, True)
    assert len(list((tmp_path / "study" / "results").iterdir())) * 8 == unpruned
    assert ran.errors() == []


@pytest.mark.repository
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_notebook_is_of_one_run(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    ran = Ran(notebook)

    assert [cell.execution_count for cell in ran.code] == list(range(1, len(ran.code) + 1))
    on_purpose = [cell for cell in ran.code if "raises-exception" in cell.metadata.get("tags", [])]
    assert len(ran.errors()) == len(on_purpose)
    shown = [text for cell in ran.code for output in cell.outputs for text in texts_of(output)]
    assert shown
    assert [found[0] for text in shown for found in OF_A_MACHINE.finditer(text)] == []


def texts_of(output: Any) -> list[str]:
    """Return the texts of a cell's output, without the escapes for colours."""
    data = output.get("data", {})
    texts = [output.get("text", ""), *output.get("traceback", []), output.get("evalue", "")]
    texts += [text for kind, text in data.items() if kind.startswith("text/")]
    return [re.sub(r"\x1b\[[\d;]*m", "", text) for text in texts]
