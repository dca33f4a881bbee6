"""Different copies of this package on driver and executors: both run the driver's."""

from __future__ import annotations

import compileall
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import facts_in, needs_java
from support.packages import HIDING_TORCH

import distributor
from distributor.spark.shipping import _own_source

PACKAGE = Path(distributor.__file__).resolve().parent
CLUSTER = "local-cluster[2,1,512]"
RunDriver = Callable[..., "subprocess.CompletedProcess[str]"]


def copy_to(folder: Path) -> Path:
    """Copy this package into a folder, and return the folder."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "distributor", ignore=ignored)
    return folder


def older_in(folder: Path) -> Path:
    """Make a copy with the same version number whose messages have other fields."""
    copy_to(folder)
    messages, channel = (
        folder / "distributor" / name for name in ("wire/messages.py", "node/node.py")
    )
    messages.write_text(re.sub(r"\n    (software|warnings): .*", "", messages.read_text()))
    channel.write_text(
        re.sub(r"NodeUp\(self._host, .*\)\)", "NodeUp(self._host))", channel.read_text())
    )
    return folder


def zipped(folder: Path) -> Path:
    archive = folder.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as packed:
        for path in sorted(folder.rglob("*.py")):
            packed.write(path, path.relative_to(folder))
    return archive


def compiled_only(folder: Path) -> Path:
    compileall.compile_dir(folder, quiet=2, legacy=True)
    for path in folder.rglob("*.py"):
        path.unlink()
    return folder


CHECKING = """
import json, os, sys, types

archive, digest, text, already, *entries = json.loads(sys.stdin.read())
sys.path[:0] = entries
if already:
    import distributor.wire.messages

def check():
    module = types.ModuleType("distributor.source")
    exec(text, vars(module))
    replaced = module.import_drivers_source(digest, lambda: archive)
    import distributor.launchers.spark.task.task
    from distributor.wire.messages import NodeUp
    return replaced, distributor.__file__, NodeUp("host", {}).software == {}

print("FACTS " + json.dumps([*check(), check()[0], sys.path.count(archive)]))
"""


def checked(tmp_path: Path, entry: Path, *, already: bool = False) -> list[Any]:
    """Import the driver's source in a process that may have another copy; return the facts."""
    own = _own_source()
    archive = tmp_path / "distributor-source-0.zip"
    archive.write_bytes(own.archive)
    given = [str(archive), own.digest, own.importing.decode(), already, str(entry)]
    packages = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {packages!r}\n{CHECKING}"],
        input=json.dumps(given),
        env={},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    facts: list[Any] = facts_in(done)  # type: ignore[assignment]
    return [archive, *facts]


@pytest.mark.parametrize("already", [False, True])
def test_a_copy_with_the_same_source_is_used(already: bool, tmp_path: Path) -> None:
    entry = zipped(copy_to(tmp_path / "copy"))

    _, replaced, used, works, again, archives = checked(tmp_path, entry, already=already)

    assert (replaced, again, works, archives) == ("", "", True, 0)
    assert used.startswith(str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("form", "already"),
    [(lambda folder: folder, True), (zipped, False), (compiled_only, False)],
    ids=["imported", "zip", "bytecode"],
)
def test_a_copy_with_another_source_is_not_imported(
    form: Callable[[Path], Path], already: bool, tmp_path: Path
) -> None:
    entry = form(older_in(tmp_path / "older"))

    archive, replaced, used, works, again, archives = checked(tmp_path, entry, already=already)

    version = "(unknown version)" if form is compiled_only else distributor.__version__
    assert replaced.startswith(f"{version} in {tmp_path}/older")
    assert used.startswith(str(archive))
    assert works
    assert (again, archives) == (replaced, 1) or already


RUNS = """
import json, logging, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master(sys.argv[1]).config("spark.executor.memory", "512m")
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
logging.basicConfig(format="WARNED %(message)s", level=logging.WARNING)

from distributor import TorchDistributor

def where(warm):
    import os
    import distributor.node.worker.main
    return [os.getppid(), distributor.node.worker.main.__file__, int(os.environ["RANK"])]

def run(warm=True):
    runner = TorchDistributor(2, local_mode=False, use_gpu=False, warm=warm, timeout=60)
    return runner.run_all(where, warm)

facts = [run(), run(), run(warm=False)]
for path in sys.argv[2:]:
    with open(path, "a") as file:
        file.write("# changed\\nraise AssertionError('it is imported')\\n")
if sys.argv[2:]:
    facts += [run(), run(warm=False)]
print("FACTS " + json.dumps({"runs": facts}))
"""


@pytest.mark.slow
@pytest.mark.spark
@needs_java
def test_executors_with_an_older_copy_run_the_drivers(
    run_driver: RunDriver, tmp_path: Path
) -> None:
    """Their Python has imported the older copy before the first task comes.

    The driver's own files change before its last runs.
    """
    ours = copy_to(tmp_path / "ours")
    older = older_in(tmp_path / "older")
    (older / "sitecustomize.py").write_text("import distributor.launchers.spark.task.task")
    python = tmp_path / "python"
    path = shlex.quote(os.pathsep.join([str(older), HIDING_TORCH]))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)

    env = {"PYSPARK_PYTHON": str(python), "PYTHONPATH": str(ours)}
    done = run_driver(RUNS, CLUSTER, str(ours / "distributor/node/worker/main.py"), env=env)

    runs = facts_in(done)["runs"]
    assert len(runs) == 5
    for ranks in runs:
        assert all("/distributor-source-" in path for _, path, _ in ranks), ranks
    warned = [line for line in done.stderr.splitlines() if line.startswith("WARNED")]
    said = [line for line in warned if f"distributor {distributor.__version__} in {older}" in line]
    assert len(said) == 1, warned


@pytest.mark.slow
@pytest.mark.spark
@needs_java
@pytest.mark.parametrize("master", ["local[2]", CLUSTER])
def test_source_that_changes_in_a_session_does_not_reach_its_executors(
    run_driver: RunDriver, tmp_path: Path, master: str
) -> None:
    """They share the disk with the driver, which continues with its imported modules."""
    ours = copy_to(tmp_path / "ours")
    changed = [
        str(ours / "distributor" / name) for name in ("node/worker/main.py", "node/agent/agent.py")
    ]

    done = run_driver(RUNS, master, *changed, env={"PYTHONPATH": str(ours)})

    before, again, fresh, *after = facts_in(done)["runs"]
    assert all(path.startswith(str(ours)) for _, path, _ in [*before, *again, *fresh])
    assert len(after) == 2
    for ranks in after:
        assert all("/distributor-source-" in path for _, path, _ in ranks), ranks
