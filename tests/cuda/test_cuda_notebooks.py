"""The notebooks and the T5 script with ``USE_GPU = True``, as plain programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.cuda import ROOT, needs_gpu, only_on_gpu

pytestmark = [*needs_gpu, only_on_gpu]
NOTEBOOKS = {
    "fsdp": ("matplotlib", "mlxtend"),
    "fsdp2": ("matplotlib", "mlxtend"),
    "dataframes": ("pyspark", "mlflow", "mlxtend"),
    "walkthrough": ("pyspark", "mlflow", "matplotlib", "mlxtend"),
}
"""The packages that each needs besides those of this package."""
T5 = """
from distributor import TorchDistributor

TorchDistributor(1, local_mode=True, use_gpu=True, storage_path="results", name="t5").run(
    {path!r}, "--epochs", "1", "--save"
)
"""


def skip_without(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if "pyspark" in packages and shutil.which("java") is None:
        missing.append("Java")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def run(source: str, folder: Path) -> str:
    """Run a program in a folder, on a Spark in its own process if it needs one."""
    (folder / "spark-defaults.conf").write_text("spark.master local[1]\n")
    program = folder / "program.py"
    program.write_text(source)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),  # packages may be there alone
        "SPARK_CONF_DIR": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MPLBACKEND": "agg",
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_a_gpu(name: str, tmp_path: Path) -> None:
    import torch

    skip_without(*NOTEBOOKS[name])
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    source = "\n\n".join(cells)
    assert "USE_GPU = False" in source
    source = source.replace("USE_GPU = False", "USE_GPU = True")
    if torch.cuda.device_count() < 2:
        source = source.replace("RANKS = 2", "RANKS = 1").replace("num_workers=2", "num_workers=1")
    assert run(source, tmp_path)


def test_the_t5_script_runs_on_a_gpu(tmp_path: Path) -> None:
    skip_without("transformers")
    assert run(T5.format(path=str(ROOT / "notebooks" / "t5.py")), tmp_path)
    assert list((tmp_path / "results").rglob("*.distcp")), "a checkpoint was saved"
