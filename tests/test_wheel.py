"""The wheel: what it requires, and what runs, or is said, if no more than that is installed."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.pages import ROOT

from distributor.core.versions import DISTRIBUTION

requirements: Any = pytest.importorskip("packaging.requirements")
SPARK = "pip install 'torch-spark-distributor[spark]'"
TRAIN = "pip install 'torch-spark-distributor[train]'"
TUNE = "pip install 'torch-spark-distributor[tune]'"

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not (ROOT / "setup.cfg").exists(), reason="not in a checkout"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, as pip does, but without a download."""
    pytest.importorskip("setuptools")
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "distributor", project / "distributor")
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", "dist"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    if "invalid command 'bdist_wheel'" in done.stderr:
        pytest.skip("needs setuptools 70.1 or the package wheel")
    assert done.returncode == 0, done.stderr
    [built] = (project / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def about(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def bare(
    wheel: Path, about: email.message.Message, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Make an environment with the wheel and its requirements only; return its Python."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    link(about.get_all("Requires-Dist", []), packages)
    return folder / "bin" / "python"


def link(lines: list[str], packages: Path) -> None:
    """Make what is required, and what that requires, importable from a folder."""
    for name in required_by(lines):
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(os.fspath(found.locate_file(top)))


def required_by(lines: list[str]) -> set[str]:
    """Return the names of what is required, without extras, and of what that requires."""
    names: set[str] = set()
    waiting = list(lines)
    while waiting:
        each = requirements.Requirement(waiting.pop())
        if each.name not in names and (each.marker is None or each.marker.evaluate({"extra": ""})):
            names.add(each.name)
            waiting += metadata.requires(each.name) or []
    return names


def run(bare: Path, program: str, folder: Path, *args: str, **env: str) -> tuple[int, str, str]:
    (folder / "program.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [bare, *(args or ("program.py",))],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_it_has_the_name_and_requires_little(about: email.message.Message) -> None:
    assert about["Name"] == DISTRIBUTION
    hard = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {re.split(r"[^\w-]", line)[0] for line in hard}
    assert names == {"cloudpickle", "nvidia-ml-py", "threadpoolctl", "torch"}
    assert {"spark", "train", "mlflow", "ray", "tune"} <= set(about.get_all("Provides-Extra", []))


def test_it_contains_the_package_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [scripts] = [archive.read(name) for name in names if name.endswith("/entry_points.txt")]
    assert {name.partition("/")[0] for name in names} == {
        "distributor",
        f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info",
    }
    sources = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("distributor/**/*.py")}
    assert names >= {*sources, "distributor/py.typed"}
    assert b"distributor = distributor.cli:main" in scripts


LOCAL = """
import sys
from importlib.util import find_spec
from distributor import TorchDistributor, runtime

def train(start):
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    runtime.progress(1, 2, loss=0.5)
    return total.item()

if __name__ == "__main__":
    print(TorchDistributor(2, local_mode=True, use_gpu=False, timeout=100).run(train, 20))
    print([name for name in sys.argv[1:] if find_spec(name)])
"""
OTHERS = "numpy", "pandas", "psutil", "pyarrow", "pyspark", "py4j", "sklearn", "tqdm"


def test_local_ranks_need_nothing_else(bare: Path, tmp_path: Path) -> None:
    code, out, err = run(bare, LOCAL, tmp_path, "program.py", *OTHERS)
    assert code == 0, err
    assert out.splitlines()[-2:] == ["41", "[]"]


MISSING = """
def error_of(call):
    try:
        call()
    except ImportError as error:
        print(error)

from distributor import TorchDistributor, distributed, doctor

error_of(lambda: TorchDistributor(2, local_mode=False, use_gpu=False))
error_of(lambda: distributed(gpus=2, use_gpu=False, remote=True)(print).distributed())
error_of(lambda: doctor(local_mode=False))
error_of(lambda: TorchDistributor(2, use_gpu=False, storage_path="runs"))
error_of(lambda: __import__("distributor.train.torch"))
error_of(lambda: __import__("distributor.tune"))
error_of(lambda: __import__("distributor.data", fromlist=["from_parquet"]).from_parquet)
error_of(lambda: __import__("distributor.ray").ray.ray_launch(gpus=0)(print).distributed())
"""


def test_an_error_says_what_to_install(bare: Path, tmp_path: Path) -> None:
    code, out, err = run(bare, MISSING, tmp_path)
    assert code == 0, err
    has_not = f"which {bare} does not have"
    spark = f"A Spark cluster needs pyspark, pyarrow and pandas, {has_not}: {SPARK}."
    assert out.splitlines() == [
        spark,
        spark,
        spark,
        f"storage_path needs pyarrow and numpy, {has_not}: {TRAIN}.",
        f"distributor.train needs pyarrow and numpy, {has_not}: {TRAIN}.",
        f"distributor.tune needs optuna, {has_not}: {TUNE}.",
        f"distributor.data.from_parquet needs pyarrow and numpy, {has_not}: {TRAIN}.",
        "Ray is not installed in this Python. Install the same version here and on all nodes: "
        "pip install 'torch-spark-distributor[ray]'.",
    ]


def test_the_command_line_says_so_too(bare: Path, tmp_path: Path) -> None:
    command = "-m distributor run --cluster --nproc 2 --cpu program.py"
    code, _, err = run(bare, "", tmp_path, *command.split())
    assert code == 2
    assert SPARK in err
    assert "Traceback" not in err
    code, out, err = run(bare, "", tmp_path, "-m", "distributor", "doctor", "--json")
    assert code == 0, out + err
