"""The search of the built documentation finds the page that a reader looks for first."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from support.pages import PAGES, ROOT

BUILT = PAGES / "_build" / "html"
SCRIPT = ROOT / "tests" / "support" / "search.js"


@pytest.mark.skipif(not (BUILT / "searchindex.js").exists(), reason="needs `make docs`")
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("install", "install"),
        ("quick start", "quick-start"),
        ("hang", "how-to/hangs"),
        ("DataFrame", "how-to/dataframes"),
        ("checkpoint", "how-to/checkpoints"),
        ("MLflow", "how-to/mlflow"),
        ("WorkerDied", "reference/api/errors"),
        ("Watchdog caught collective operation timeout", "troubleshooting"),
    ],
)
def test_the_page_is_found_first(query: str, page: str) -> None:
    command = ["node", str(SCRIPT), str(BUILT), query]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(found)[0] == page
