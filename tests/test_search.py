"""What a reader looks for in the built documentation is found on the page that says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.pages import ROOT

BUILT = ROOT / "docs" / "_build" / "html"
FIRST = {
    "LoRA": "how-to/fine-tune",
    "fine-tune": "how-to/fine-tune",
    "hugging face": "how-to/frameworks",
    "jupyter": "how-to/notebooks-and-jobs",
    "logs": "how-to/notebooks-and-jobs",
    "spark-submit": "how-to/notebooks-and-jobs",
    "horovod": "migrate/others",
    "petastorm": "migrate/others",
    "hyperopt": "migrate/others",
    "optuna": "how-to/study",
    "hyperparameters": "how-to/study",
    "straggler": "how-to/report",
    "goodput": "how-to/report",
    "single gpu": "quick-start",
    "checkpoint": "how-to/checkpoints",
    "volume": "how-to/platforms",
}


@pytest.mark.repository
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js runs the search")
@pytest.mark.skipif(not BUILT.exists(), reason="make docs builds the documentation")
def test_the_first_result_of_a_search() -> None:
    program = Path(__file__).with_name("support") / "search.js"
    done = subprocess.run(["node", program, BUILT, *FIRST], capture_output=True, check=True)
    assert json.loads(done.stdout) == FIRST
