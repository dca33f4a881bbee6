"""The benchmarks run, and the documentation shows what they found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import load
from benchmarks.scale_tables import descriptor_table, growth_table
from benchmarks.summary import highlights, summary

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.slow
def test_a_quick_look_measures_every_peer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "launch"]
    command += ["--peers", "ours,floor", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["launch"]["rows"]
    peers = {"ours", "ours_ahead", "ours_cold", "floor_processes", "floor_forks"}
    assert {row["peer"] for row in rows} == peers
    for row in rows:
        assert row["what"] != "failed", row["note"]
        assert {"python", "torch", "pyspark"} <= set(row["versions"])
        assert row["repeats"] == len(row["values"]) > 0
    assert done.stdout.endswith(f"{summary(results)}\n")


def test_the_pages_show_the_results() -> None:
    text = (ROOT / "benchmarks" / "SCALE.md").read_text()
    for make in growth_table, descriptor_table:
        table = make(load(RESULTS))
        assert table in text
        text = text.replace(table, "")
    assert re.findall(r"\d+\.\d+", text) == [], "it has no other figures"

    assert summary(load(RESULTS)) in (ROOT / "docs/explanation/performance.md").read_text()
    table = highlights(load(RESULTS))
    assert table.count("\n") == 1 + 5
    assert table in (ROOT / "README.md").read_text()
