"""The benchmarks run, and the documentation shows what they found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import predict
from benchmarks.report import load
from benchmarks.scale_tables import descriptor_table, growth_table
from benchmarks.summary import highlights, summary

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DEADLINE = 600
PEERS = {"ours", "ours_ahead", "ours_cold", "floor_processes", "floor_forks"}


class Measured:
    """What one quick look gave."""

    def __init__(self, name: str, out: Path, printed: str) -> None:
        self.printed = printed
        self.results: dict[str, Any] = json.loads((out / "results.json").read_text())
        self.rows: list[dict[str, Any]] = self.results[name]["rows"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return quick_look("launch", "ours,floor", tmp_path_factory.mktemp("results"))


def quick_look(name: str, peers: str, out: Path) -> Measured:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", name]
    command += ["--peers", peers, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return Measured(name, out, done.stdout)


@pytest.mark.slow
def test_every_peer_that_was_asked_for_is_measured(measured: Measured) -> None:
    assert {row["peer"] for row in measured.rows} == PEERS
    assert [row["note"] for row in measured.rows if row["what"] == "failed"] == []


@pytest.mark.slow
def test_every_row_tells_versions_and_repeats(measured: Measured) -> None:
    for row in measured.rows:
        assert {"python", "torch", "pyspark"} <= set(row["versions"])
        assert row["repeats"] == len(row["values"]) > 0
        assert row["min"] <= row["median"] <= row["max"]


@pytest.mark.slow
def test_ratios_are_to_this_project_in_the_same_case(measured: Measured) -> None:
    check_ratios(measured.rows)


def test_ratios_of_the_results_are_to_this_project_in_the_same_case() -> None:
    results = load(RESULTS)
    assert results["launch"]["rows"]
    check_ratios(results["launch"]["rows"])


def check_ratios(rows: list[dict[str, Any]]) -> None:
    ours = {(row["case"], row["what"]): row["median"] for row in rows if row["peer"] == "ours"}
    for row in rows:
        assert row["ratio"] == pytest.approx(row["median"] / ours[row["case"], row["what"]])


@pytest.mark.slow
def test_the_summary_ends_what_is_printed(measured: Measured) -> None:
    table = summary(measured.results)
    assert table.count("\n") > 2
    assert measured.printed.endswith(f"{table}\n")


@pytest.mark.slow
def test_predictions_have_rates_loads_and_memory(tmp_path: Path) -> None:
    measured = quick_look("predict", "ours", tmp_path)
    ours = [row for row in measured.rows if row["peer"] == "ours"]
    assert [row["what"] for row in ours] == [
        *(predict.RATE, predict.LOADS) * 3,
        *(predict.MEMORY, predict.MODELS),
        predict.FIRST,
    ]
    assert summary(measured.results).count("first predictions") == 2
    loads = [row["median"] for row in ours if row["what"] == predict.LOADS]
    assert all(1 <= count <= 1 + predict.LATER_RUNS for count in loads), loads
    assert summary(measured.results).count("predictions for") == 6


def test_a_model_of_the_predictions_is_always_the_same(tmp_path: Path) -> None:
    marks = tmp_path / "loads"
    rows = torch.ones(4, 16)
    first, second = (predict.load(16, (8, 8), str(marks)) for _ in range(2))
    assert torch.equal(first(rows), second(rows))
    assert marks.read_text() == f"{os.getpid()}\n" * 2


def test_the_page_about_scale_has_the_figures_of_the_results_and_no_others() -> None:
    text = (ROOT / "benchmarks" / "SCALE.md").read_text()
    for make in growth_table, descriptor_table:
        table = make(load(RESULTS))
        assert table in text
        text = text.replace(table, "")
    assert re.findall(r"\d+\.\d+", text) == []


def test_the_page_about_performance_shows_the_summary_of_the_results() -> None:
    assert summary(load(RESULTS)) in (ROOT / "docs/explanation/performance.md").read_text()


def test_the_readme_shows_three_lines_of_the_results() -> None:
    table = highlights(load(RESULTS))
    assert table.count("\n") == 1 + 3
    assert table in (ROOT / "README.md").read_text()


def test_the_results_are_those_of_a_whole_run() -> None:
    results = load(RESULTS)
    assert [name for name, found in results.items() if found["quick"]] == []
    assert {name: found["machine"] for name, found in results.items()} == dict.fromkeys(
        results, results["launch"]["machine"]
    )
