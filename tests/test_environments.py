"""Ranks run in an environment of their own: packed, or installed on each node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from conftest import cluster_is_slow
from support.cluster import cluster_on
from support.machines import machines_on_loopback
from support.packages import NAME, environment, packed, wheel
from support.ranks import Distribute
from support.waiting import DEADLINE, assert_gone, until

import distributor
from distributor import ExecutorNotReady, TorchDistributor
from distributor.node import environment as node_environment

cloudpickle.register_pickle_by_value(sys.modules[__name__])
OURS = "iniconfig"
"""A small package that this Python, and so Spark's Python, has."""
THEIRS = "99.0"


def look(name: str) -> dict[str, Any]:
    """Return what a rank runs with."""
    from distributor import runtime

    program = f"import {name}; print({name}.VERSION)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return {
        "rank": runtime.get_global_rank(),
        "version": metadata.version(name),
        "module": __import__(name).VERSION,
        "child": printed.stdout.strip(),
        "prefix": sys.prefix,
        "software": (distributor.__version__, cloudpickle.__version__, torch.__version__),
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the cache folder of this process; executors get it through ``env``."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DISTRIBUTOR_CACHE", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack an environment with another version of a package than this Python has."""
    folder = tmp_path_factory.mktemp("packed")
    return packed(environment(folder / "made", THEIRS, OURS), folder / "environment.tar.gz")


def on_nodes(cache: Path, **variables: object) -> dict[str, str]:
    """Return variables by which nodes use the cache, and find wheels nowhere else."""
    values = {"DISTRIBUTOR_CACHE": cache, "PIP_NO_INDEX": "1", **variables}
    return {name: str(value) for name, value in values.items()}


@cluster_is_slow
def test_ranks_of_a_packed_environment_have_its_packages(
    distribute: Distribute, archive: Path, cache: Path
) -> None:
    ranks = distribute(2, environment=archive, env=on_nodes(cache))
    at_once = [ranks.submit_all(look, OURS) for _ in range(2)]
    found, again = (future.result(DEADLINE) for future in at_once)

    assert metadata.version(OURS) != THEIRS
    assert [report["rank"] for report in found] == [0, 1]
    for report in found:
        assert report["version"] == report["module"] == report["child"] == THEIRS
        assert report["prefix"] != sys.prefix
        ours = (distributor.__version__, cloudpickle.__version__, torch.__version__)
        assert report["software"] == ours
    assert {report["prefix"] for report in again} == {report["prefix"] for report in found}
    assert distribute(1).run(metadata.version, OURS) == metadata.version(OURS), "its own zygote"


def test_the_users_modules_come_before_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = packed(environment(tmp_path / "made", "1.0"), tmp_path / "made.tar.gz")
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / f"{NAME}.py").write_text("VERSION = 'of the user'")
    monkeypatch.syspath_prepend(str(beside))

    monkeypatch.setenv("PYTHONPATH", f"/no/such/folder{os.pathsep}{beside}")
    ranks = TorchDistributor(1, use_gpu=False, timeout=120, warm=False, environment=archive)

    def versions() -> tuple[str, str]:
        import gadget  # type: ignore[import-not-found]

        program = [sys.executable, "-c", "import gadget; print(gadget.VERSION)"]
        printed = subprocess.run(program, capture_output=True, text=True)
        return gadget.VERSION, printed.stdout.strip()

    assert ranks.run(versions) == ("of the user", "of the user")


@cluster_is_slow
def test_requirements_are_installed_once_on_each_node(
    distribute: Distribute, cache: Path, tmp_path: Path
) -> None:
    env = on_nodes(cache, PIP_FIND_LINKS=tmp_path / "wheels")
    wheel(tmp_path / "wheels", "1.0")
    ranks = distribute(2, environment=[f"{NAME}==1.0"], env=env)
    found = ranks.run_all(look, NAME)
    (folder,) = {report["prefix"] for report in found}

    assert [report["version"] for report in found] == ["1.0", "1.0"]
    assert [report["child"] for report in found] == ["1.0", "1.0"]
    assert Path(folder).parent == cache
    made = Path(folder).stat().st_ino, (Path(folder) / ".complete").stat().st_mtime_ns
    assert ranks.run(look, NAME)["prefix"] == folder
    assert made == (Path(folder).stat().st_ino, (Path(folder) / ".complete").stat().st_mtime_ns)


def installers(folder: str) -> dict[str, str]:
    """Return what has installed each package of an environment."""
    return {
        f"{each.name}=={each.version}": (each.read_text("INSTALLER") or "").strip()
        for each in metadata.distributions(path=[each for each in sys.path if folder in each])
    }


def test_uv_installs_where_it_is_configured(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheel(wheels, "1.0")
    wheel(wheels, THEIRS, OURS)
    env = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(wheels)}
    before = metadata.version(OURS)

    def ranks(*requirements: str) -> TorchDistributor:
        return TorchDistributor(1, use_gpu=False, warm=False, environment=requirements, env=env)

    # What this Python has is neither installed again nor replaced here.
    own = ranks(f"{NAME}==1.0", f"{OURS}=={THEIRS}", "torch", "pytest")
    assert own.run(installers, "requirements-") == {
        f"{NAME}==1.0": "uv",
        f"{OURS}=={THEIRS}": "uv",
    }
    assert metadata.version(OURS) == before
    with pytest.raises(ExecutorNotReady) as caught:
        ranks("no-such-gadget==3").run(os.getpid)
    message = str(caught.value)
    assert "uv could not install no-such-gadget==3. Set its package indexes by UV_*" in message
    assert "\n    " in message, "it contains the last lines of uv"


HANGING = """
import os, pathlib, shutil, time

def build_wheel(folder, config_settings=None, metadata_directory=None):
    folder_of_test = pathlib.Path(os.environ["FOLDER_OF_TEST"])
    (folder_of_test / "begun").write_text(f"{os.getppid()} {os.getpid()}")
    while not (folder_of_test / "go").exists():
        time.sleep(0.02)
    built = folder_of_test / "wheels" / "gadget-5.0-py3-none-any.whl"
    return pathlib.Path(shutil.copy(built, folder)).name
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "gadget"
version = "5.0"
"""
INSTALLING = """
import sys
from importlib import metadata
from distributor import TorchDistributor

ranks = TorchDistributor(1, use_gpu=False, warm=False, environment=[sys.argv[1]])
print("VERSION", ranks.run(metadata.version, "gadget"))
"""


@pytest.fixture
def slow_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a package whose build waits for a file called ``go``."""
    wheel(tmp_path / "wheels", "5.0")
    source = tmp_path / "source"
    source.mkdir()
    (source / "backend.py").write_text(HANGING)
    (source / "pyproject.toml").write_text(PYPROJECT)
    monkeypatch.setenv("FOLDER_OF_TEST", str(tmp_path))
    return source


@pytest.mark.slow
def test_a_killed_installation_leaves_no_process_and_is_repeated(
    slow_to_build: Path, tmp_path: Path
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(INSTALLING)
    command = [sys.executable, str(script), str(slow_to_build)]
    begun = tmp_path / "begun"
    with subprocess.Popen(command) as driver:
        until(lambda: begun.exists() and " " in begun.read_text(), "pip builds", 60)
        driver.kill()
    assert_gone([int(pid) for pid in begun.read_text().split()])

    (tmp_path / "go").touch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert "VERSION 5.0" in done.stdout, done.stderr


# On a cluster whose nodes have packages that the driver lacks

TELLING = """
from importlib import metadata
import pyarrow

def version(batches):
    for _ in batches:
        yield pyarrow.RecordBatch.from_pydict({"version": [metadata.version("gadget")]})

def ending_of(**settings):
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False, **settings)
    try:
        return ranks.run_all(metadata.version, "gadget")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

rows = spark.range(0, 1, 1, 1).mapInArrow(version, "version string").collect()
send(
    of_spark=[row.version for row in rows],
    packed=ending_of(environment=ARCHIVE),
    own=ending_of(),
    newest=ending_of(environment=["gadget"]),
    pinned=ending_of(environment=["gadget==2.0"]),
)
"""


@pytest.mark.spark
@pytest.mark.slow
def test_ranks_have_other_versions_than_sparks_own_python(tmp_path: Path) -> None:
    """Spark's Python needs no torch. If nodes install different versions, the error names them."""
    without_torch = tmp_path / "without_torch"
    without_torch.mkdir()
    (without_torch / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    archive = packed(environment(tmp_path / "made", THEIRS), tmp_path / "environment.tar.gz")
    with machines_on_loopback(4) as machines:
        for machine, newest in zip(machines[2:], ("3.0", "4.0"), strict=True):
            wheel(tmp_path / newest, newest)
            wheel(tmp_path / newest, "2.0")
            machine.environment |= {
                "PYTHONPATH": f"{wheel(tmp_path / 'of_spark', '1.0')}:{without_torch}",
                "PIP_FIND_LINKS": str(tmp_path / newest),
                "DISTRIBUTOR_CACHE": str(tmp_path / f"cache-{newest}"),
            }
        source = TELLING.replace("ARCHIVE", repr(str(archive)))
        with cluster_on(machines, tmp_path) as cluster, cluster.driver(source) as driver:
            report = driver.receive("packed")

    assert report["of_spark"] == ["1.0"]
    assert report["packed"] == [THEIRS] * 2
    assert "which has no torch" in report["own"]
    differ = r"ExecutorNotReady: .* differ in gadget: 3\.0 on \S+ \(node \d\); 4\.0 on \S+ \(node"
    assert re.match(differ, report["newest"]), report["newest"]
    assert "'gadget==...'" in report["newest"]
    assert report["pinned"] == ["2.0"] * 2


def test_pips_options_are_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_environment, "OPTIONS_SECONDS", 0.2)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 10")
    python.chmod(0o755)
    began = time.monotonic()
    assert node_environment._pip_options(python, os.environ) == set()
    assert time.monotonic() < began + 5
