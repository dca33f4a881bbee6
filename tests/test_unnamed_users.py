"""Users without a passwd entry, as in containers that run under any number."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import facts_in, needs_java

USER = 54321
"""A user who has no passwd entry."""
AS_USER = ["unshare", "--user", f"--map-user={USER}"]


def why_not_unnamed() -> str:
    """Return why no process can run as that user, or an empty string if one can."""
    if not shutil.which("unshare"):
        return "util-linux is not installed"
    tried = subprocess.run([*AS_USER, "id", "-un"], capture_output=True, text=True)
    return "" if "cannot find name" in tried.stderr else f"no user can be unnamed: {tried.stderr}"


WHY_NOT = why_not_unnamed()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]
RUNS = """
import json, os, sys
from distributor import TorchDistributor

def lacks():
    import pathlib, pwd

    found = []
    for what in (lambda: pwd.getpwuid(os.getuid()), pathlib.Path.home):
        try:
            what()
        except (KeyError, RuntimeError) as error:
            found.append(type(error).__name__)
    return found

def train():
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    return os.getuid(), lacks(), model.module.weight.grad.item()

def fail():
    raise LookupError("no such thing")

runner = TorchDistributor(2, local_mode=sys.argv[1] == "local", use_gpu=False, timeout=120)
facts = {"trained": runner.run_all(train)}
try:
    runner.run(fail)
except LookupError as error:
    facts["failed"] = str(error)
print("FACTS " + json.dumps(facts))
"""
CLUSTER = """
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local-cluster[1,2,1024]")
builder = builder.config("spark.executor.memory", "512m").config("spark.log.level", "OFF")
builder.config("spark.ui.enabled", "false").getOrCreate()
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Make an interpreter that runs as the user, who has no home either."""
    python = tmp_path / "python"
    unset = ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME")
    variables = [*(f"--unset={name}" for name in unset), f"TMPDIR={tmp_path}"]
    command = shlex.join(["env", *variables, *AS_USER, sys.executable])
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)
    return str(python)


def check(facts: dict[str, object]) -> None:
    assert facts["trained"] == 2 * [[USER, ["KeyError", "RuntimeError"], 1.5]]
    assert str(facts["failed"]).startswith("no such thing")


FOLDERS = """
from distributor.node import cache
from distributor.core import files
print(cache.cache_folder({}), files.new_scratch_path())
"""


def test_the_folders_of_such_a_user_are_temporary(python: str, tmp_path: Path) -> None:
    done = subprocess.run([python, "-c", FOLDERS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    environments, scratch = done.stdout.split()
    assert environments == f"{tmp_path}/distributor-{USER}"
    assert scratch.startswith(f"{tmp_path}/pymp-")


@pytest.mark.slow
def test_local_runs_work(python: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(RUNS)
    command = [python, str(script), "local"]
    check(facts_in(subprocess.run(command, capture_output=True, text=True, timeout=200)))


@pytest.mark.spark
@needs_java
@pytest.mark.slow
def test_runs_work_if_the_python_of_executors_has_such_a_user(
    run_driver: RunDriver, python: str
) -> None:
    done = run_driver(CLUSTER + RUNS, "cluster", env={"PYSPARK_PYTHON": python})
    check(facts_in(done))
