"""The notebooks run from top to bottom, some on a cluster, and are saved as they ran.

Every day one notebook's beginning runs, and the code of all is checked against this package.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_java
from support.notebook_code import UsesOfPackage
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

    def plots(self) -> int:
        """Count the plots."""
        outputs = [output for cell in self.code for output in cell.outputs]
        return sum("image/png" in output.get("data", {}) for output in outputs)

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


def runs_of(place: Place, name: str) -> list[Any]:
    """List the MLflow runs of a notebook, the first first."""
    from mlflow import MlflowClient

    client = MlflowClient(place.uri)
    experiment = client.get_experiment_by_name(name)
    return list(client.search_runs([experiment.experiment_id], order_by=["start_time"]))


def losses_of(place: Place, run: Any) -> list[float]:
    from mlflow import MlflowClient

    history = MlflowClient(place.uri).get_metric_history(run.info.run_id, "loss")
    return [metric.value for metric in history]


@pytest.mark.slow(ci=True)
@pytest.mark.spark
@needs_java
def test_the_walkthrough(place: Place) -> None:
    """Train alone, on two local ranks, and on two executors of a standalone cluster."""
    ran = Ran(place.run("walkthrough"))

    runs = runs_of(place, "walkthrough")
    assert [run.info.run_name for run in runs] == ["alone", "local mode", "cluster mode"]
    assert [run.info.status for run in runs] == ["FINISHED"] * 3
    assert [run.data.params for run in runs] == [{"epochs": "3", "batch_size": "64"}] * 3
    assert [run.data.tags.get("distributor.mode") for run in runs] == [None, "local", "cluster"]
    for run in runs:
        losses = losses_of(place, run)
        # One rank's, of the 63 steps of each epoch.
        assert len(losses) == 3 * (63 // 10)
        assert losses[-1] < 0.5 * losses[0]
        assert run.data.metrics["accuracy"] > 0.85
    assert ran.value("accuracy(Net().to(DEVICE))") < 0.3

    # Each rank has its share of the 4,000 digits, and prints its size.
    alone = ran.lines('with mlflow.start_run(run_name="alone") as run:')
    assert sum("63 steps" in line for line in alone) == 3
    for mode in ("local", "cluster"):
        cell = f'with mlflow.start_run(run_name="{mode} mode") as run:'
        shown = [line.partition(": ")[0] for line in ran.lines(cell) if "63 steps" in line]
        assert sorted(shown) == [
            f"[{rank}] epoch {epoch}" for rank in (0, 1) for epoch in (1, 2, 3)
        ]
        assert 0 < ran.value(cell) < 0.5, "what rank 0 returned"
    for folder in ("alone", "local", "cluster"):
        saved = (place.folder / "walkthrough" / "checkpoints" / folder).iterdir()
        assert sorted(path.name for path in saved) == ["epoch-1.pt", "epoch-2.pt", "epoch-3.pt"]

    assert ran.value("torch.equal(predict(loaded), predict(model))") is True
    assert ran.errors() == []
    assert ran.plots() == 2


@pytest.mark.slow
@pytest.mark.spark
@needs_java
def test_the_serverless_quick_start(place: Place) -> None:
    """Run on a local Spark, which starts sooner; the walkthrough runs on the cluster."""
    ran = Ran(place.run("serverless", **{"spark.master": "local[2]"}))

    check_introduction(ran)
    assert ran.value("train.distributed(epochs=20)")[0] < 0.8
    assert ran.value("train_on_cluster.distributed(epochs=20)")[0] < 0.8
    assert ran.value("future.cancel(), future.cancelled()") == (True, True)
    assert ran.value("failed") == [0]
    assert ran.errors() == ["ZeroDivisionError"]

    runs = runs_of(place, "serverless")
    by_name: dict[str, list[Any]] = {}
    for run in runs:
        by_name.setdefault(run.info.run_name, []).append(run)
    assert {name: len(found) for name, found in by_name.items() if name != "train"} == {
        "introduce": 1,
        "train_on_cluster": 1,
        "divide": 2,
    }
    trained = [*by_name["train"], *by_name["train_on_cluster"]]
    finished = [run for run in trained if run.info.status == "FINISHED"]
    assert sorted(len(losses_of(place, run)) for run in finished) == [10, 10, 20, 20]
    assert sorted(run.info.status for run in trained) == ["FINISHED"] * 4 + ["KILLED"]
    assert {run.info.status for run in by_name["divide"]} == {"FAILED"}


@pytest.mark.slow
@pytest.mark.spark
@needs_java
def test_training_on_dataframes(place: Place) -> None:
    """Prepare digits in Spark; the three ways to train on them are equally accurate."""
    ran = Ran(place.run("dataframes"))

    unequal, equal = ran.value("count_digits(rows)"), ran.value("count_digits(train_rows)")
    assert max(unequal) > min(unequal) > 350
    assert equal == [min(unequal)] * 10
    held_out = 5000 - sum(unequal)

    name = "TorchDistributor"
    accuracies = {name: ran.value(f'accuracies = {{"{name}": trained["accuracy"]}}')}
    accuracies |= ran.value('accuracies["TorchTrainer"] = result.metrics["accuracy"]')
    assert list(accuracies) == [name, "@distributed", "TorchTrainer"]
    [accuracy] = set(accuracies.values())
    assert accuracy > 0.88

    # Each rank has half of the training rows, and prints the same in each way to train.
    steps = math.ceil(sum(equal) / 2 / 32)
    ways = [
        "trained = ranks.run(train_on_ranks, train_rows, test_data)",
        'accuracies["@distributed"], *_ = train_on_cluster.distributed(train_rows, test_data)',
        ").fit()",
    ]
    shown = [sorted(line for line in ran.lines(way) if " steps, loss " in line) for way in ways]
    assert [line.partition(", loss")[0] for line in shown[0]] == [
        f"[{rank}] epoch {epoch}: {steps} steps" for rank in (0, 1) for epoch in range(1, 6)
    ]
    assert shown[1:] == shown[:1] * 2

    # Spark counts the same correct answers, among all rows that were held out.
    scores = ran.table("scores").values()
    assert sum(row["rows"] for row in scores) == held_out
    in_spark, on_ranks = ran.value(
        'float(scores["correct"].sum() / scores["rows"].sum()), trained["accuracy"]'
    )
    assert in_spark == on_ranks == accuracy
    assert ran.errors() == []


@pytest.mark.slow
@pytest.mark.spark
@needs_java
def test_an_estimator_in_a_pipeline(place: Place) -> None:
    """Choose among four settings, and score the saved pipeline in a new process."""
    ran = Ran(place.run("estimator"))

    scores = ran.table("scores")
    assert len(scores) == 4
    best = max(scores.values(), key=lambda row: row["accuracy"])
    assert (best["stepSize"], best["maxIter"]) == (1e-3, 4)
    accuracy = ran.value("accuracy")
    assert accuracy > 0.88
    files = 'sorted(path.name for path in (FOLDER / "model").glob("stages/1_*/*"))'
    assert ran.value(files) == ["metadata", "torch.pt"]
    assert ran.value("loaded, loaded == accuracy") == (accuracy, True)
    assert ran.errors() == []


def check_introduction(ran: Ran) -> None:
    nodes = [{"rank": rank, "local": rank, "node": 0} for rank in (0, 1)]
    assert ran.value('introduce.distributed("hello")') == nodes
    assert ran.value('introduce("hello")') == nodes[0]
    shown = ran.lines('introduce.distributed("hello")')
    assert [line for line in sorted(shown) if line.startswith("[")] == [
        f"[{rank}] hello from rank {rank} of 2" for rank in (0, 1)
    ]


def test_the_serverless_quick_start_begins(tmp_path: Path) -> None:
    """Run the cells above the first that trains, which needs a tracking server."""
    for module in ("ipykernel", "nbclient"):
        pytest.importorskip(module)
    ran = Ran(run_here("serverless", tmp_path / "serverless", before="import torch"))

    check_introduction(ran)
    assert len(ran.code) == 3
    assert ran.errors() == []


def run_here_or_skip(name: str, folder: Path) -> Ran:
    """Run a notebook that needs no cluster, or skip the test if an import is missing."""
    for module in ("ipykernel", "matplotlib", "mlxtend", "nbclient"):
        pytest.importorskip(module)
    return Ran(run_here(name, folder))


@pytest.mark.slow
def test_sharded_training(tmp_path: Path) -> None:
    """Resume FSDP2 after a rank is lost; then resume on one rank from the shards of two."""
    folder = tmp_path / "fsdp2"
    ran = run_here_or_skip("fsdp2", folder)

    shown = ran.lines('result = trainer("digits", train_func, config=config).fit()')
    goes_on = ["[0] killed", "[0] goes on from checkpoint_000000 with epoch 1"]
    assert [line for line in shown if line.startswith("[0]")] == goes_on
    digits = Result.from_path(folder / "results" / "digits")
    assert [report.attempt for report in digits.reports] == [0, 1, 1, 1, 1, 1, 1]
    assert {report.world_size for report in digits.reports} == {2}
    assert [report.metrics["epoch"] for report in digits.reports] == [0, 1, 2, 3, 4, 5, 5]
    losses = [report.metrics["loss"] for report in digits.reports[:-1]]
    assert losses[-1] < 0.5 * losses[0]

    assert ran.value(
        "{Path(each.path).name: sorted(os.listdir(each.path)) for each in (last, full_model)}"
    ) == {
        "checkpoint_000005": [
            ".manifest.json",
            ".metadata",
            ".reports.jsonl",
            "__0_0.distcp",
            "__1_0.distcp",
        ],
        "full_model": [".manifest.json", ".reports.jsonl", "full-model.pt"],
    }
    of_full_model, of_ranks = ran.value('accuracy(model, "cpu"), result.metrics["accuracy"]')
    assert of_full_model == of_ranks > 0.8

    assert "[0] goes on from checkpoint_000005 with epoch 6" in ran.lines("longer = trainer(")
    longer = Result.from_path(folder / "results" / "longer")
    assert [report.world_size for report in longer.reports] == [1, 1]
    assert longer.reports[0].metrics["loss"] < losses[2]
    assert longer.reports[-1].metrics["accuracy"] > 0.8

    peaks = ran.value("{name: round(max(timeline(name)[1])) for name in VARIANTS}")
    assert peaks["mixed precision"] < peaks["reshard_after_forward=False"]
    profiles = sorted(path.name for path in Path(digits.path).glob("*.json"))
    assert profiles == ["rank0_memory_profile.json", "rank1_memory_profile.json"]
    assert ran.errors() == []
    assert ran.plots() == 2


@pytest.mark.slow
def test_ways_to_train(tmp_path: Path) -> None:
    """Compare DDP and FSDP: equal accuracy, less and less memory."""
    ran = run_here_or_skip("fsdp", tmp_path / "fsdp")

    rows = ran.table("table = pandas.DataFrame(rows).T")
    ddp, fsdp, in_units = (rows[way] for way in ("DDP", "FSDP", "FSDP in units"))
    assert ddp["accuracy"] > 0.8
    assert all(abs(row["accuracy"] - ddp["accuracy"]) < 0.02 for row in (fsdp, in_units))
    assert fsdp["kept MB"] == pytest.approx(ddp["kept MB"] / 2, rel=0.01)
    assert ddp["peak MB"] > fsdp["peak MB"] > in_units["peak MB"]

    of_one_process, of_ranks = ran.value('model.load_state_dict(weights["FSDP in units"])')
    assert of_one_process == of_ranks
    assert ran.errors() == []


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_notebook_uses_what_this_package_has(name: str) -> None:
    """Check each import of the package, and the arguments of each call of what is imported."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", nbformat.NO_CONVERT)
    used = UsesOfPackage()
    for cell in Ran(notebook).code:
        compile(cell.source, "<cell>", "exec")
        used.visit(ast.parse(cell.source))

    assert used.calls >= (1 if name == "estimator" else 2)


def test_the_code_of_the_t5_script_uses_what_this_package_has() -> None:
    used = UsesOfPackage()
    used.visit(ast.parse((NOTEBOOKS / "t5.py").read_text()))

    assert used.calls >= 2


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
