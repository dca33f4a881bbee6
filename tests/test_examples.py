"""The examples of Ray Train, Databricks and PyTorch run with other import lines: tests/examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import needs_java
from support.cluster import Driver, cluster_on
from support.machines import machines_on_loopback
from support.waiting import DEADLINE

from distributor.train import Result

FOLDER = Path(__file__).parent / "examples"
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Expected(NamedTuple):
    """What an example leaves behind."""

    epochs: list[int]
    """The epoch of each report, in order."""
    attempts: list[int]
    files: set[str]
    """The names of the files in its latest checkpoint."""
    needs: str = "torch"


EXAMPLES = {
    "quick_start": Expected([0, 1, 2], [0, 0, 0], {"model.pt"}),
    "fault_tolerance": Expected(
        [0, 1, 2, 3], [0, 0, 1, 0], {"model.pt", "optimizer.pt", "extra.pt"}
    ),
    "accelerate_loop": Expected([0, 1, 2], [0, 0, 0], {"model.bin"}, "accelerate"),
    "lightning_trainer": Expected([0, 1, 2], [0, 1, 1], {"checkpoint.ckpt"}, "lightning"),
    "transformers_trainer": Expected(
        [1, 2, 3],
        [0, 1, 1],
        {"model.safetensors", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"},
        "transformers",
    ),
}


def needs_of(name: str) -> str:
    return EXAMPLES[name].needs if name in EXAMPLES else "torch"


def check(name: str, folder: Path, output: str) -> None:
    """Check what an example has reported, and the accuracy that it prints at the end."""
    if name == "databricks_air":
        return check_databricks(folder, output)
    expected = EXAMPLES[name]
    for run in (folder / "results").glob("accelerate_*"):
        seen = [report.metrics["seen"] for report in Result.from_path(run).reports]
        assert seen == [128] * 3, "each rank trains on its half of the data"
    result = Result.from_path(folder / "results" / name)
    assert [report.metrics["epoch"] for report in result.reports] == expected.epochs
    assert [report.attempt for report in result.reports] == expected.attempts
    assert [report.world_size for report in result.reports] == [2] * len(expected.epochs)
    assert result.checkpoint
    files = {path.name for path in Path(result.checkpoint.path).rglob("*") if path.is_file()}
    assert files >= expected.files
    found = re.findall(r"^accuracy (\S+)$", output, re.MULTILINE)
    assert found
    assert all(float(accuracy) > 0.9 for accuracy in found), found


def run_here(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def check_databricks(folder: Path, output: str) -> None:
    """Check that two ranks have trained two epochs, and one rank another from the checkpoint."""
    lines = output.splitlines()
    assert "trained [0, 1] [0, 1]" in lines
    assert "continued [2]" in lines
    assert float(re.findall(r"^accuracy (\S+)$", output, re.MULTILINE)[-1]) > 0.9
    saved = folder / "results" / "databricks_air"
    assert len([*saved.glob("epoch-0/*.distcp")]) == 2
    assert {path.name for path in saved.glob("epoch-*")} == {f"epoch-{n}" for n in range(3)}


def skip_without(package: str) -> None:
    if find_spec(package) is None:  # importing it here would only take time
        pytest.skip(f"{package} is not installed")


ON_A_CLUSTER = ("fault_tolerance", "databricks_air")
RUN_ALL = """
import contextlib, io, runpy, sys, traceback

sys.path.insert(0, "{folder}")
for name in {names!r}:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(f"{folder}/{{name}}.py", run_name="__main__")
        except Exception:
            traceback.print_exc(file=printed)
    send(**{{name: printed.getvalue()}})
"""
"""Runs the examples in one process, as the cells of a notebook would."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "quick_start" else pytest.mark.slow)
        for name in (*EXAMPLES, "databricks_air")
    ],
)
def test_an_example_runs_on_this_machine(name: str, tmp_path: Path) -> None:
    skip_without(needs_of(name))
    check(name, tmp_path, run_here(name, tmp_path))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Path]]:
    """Start a driver on a standalone cluster, which runs examples in turn."""
    folder = tmp_path_factory.mktemp("examples")
    names = [name for name in ON_A_CLUSTER if find_spec(needs_of(name)) is not None]
    source = RUN_ALL.format(folder=FOLDER, names=names)
    with (
        machines_on_loopback(4) as machines,
        cluster_on(machines, folder) as cluster,
        cluster.driver(source) as driver,
    ):
        yield driver, folder


@pytest.mark.slow
@pytest.mark.spark
@needs_java
@pytest.mark.parametrize("name", ON_A_CLUSTER)
def test_an_example_runs_on_a_standalone_cluster(name: str, driver: tuple[Driver, Path]) -> None:
    skip_without(needs_of(name))
    process, folder = driver
    check(name, folder, process.receive(name, DEADLINE)[name])
