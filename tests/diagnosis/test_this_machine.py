"""`distributor doctor` on this machine: sound, and with each thing really broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyspark
import pytest
from conftest import needs_java
from support.doctor import doctor
from support.machines import small_disk, why_not_mounted
from support.packages import python_that_begins
from support.ports import free_port

import distributor
from distributor.core.gpus import DriverVersion
from distributor.core.versions import release
from distributor.diagnosis.machine import Machine, examine, machine_checks

NEEDED_JAVA, OLD_JAVA = (
    (17, "1.8.0_392") if release(pyspark.__version__) >= (4,) else (8, "1.7.0_80")
)
NOT_MOUNTED = why_not_mounted()
needs_mounts = pytest.mark.skipif(bool(NOT_MOUNTED), reason=NOT_MOUNTED)
UNREACHED = ("run", "versions", "network to the driver", "network between executors")


def test_a_sound_machine_has_no_failure(tmp_path: Path) -> None:
    found = doctor("--storage", str(tmp_path))

    assert (found.exit_code, found.having("failure")) == (0, {}), found.text
    assert {"Python", "torch", "shared memory", "disk", "storage"} < found.having("ok").keys()
    assert "2 ranks started" in found.having("ok")["run"]["found"]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_the_table_is_printed_and_shown_in_notebooks() -> None:
    source = "import distributor; r = distributor.doctor(1); print(r); print(r._repr_html_())"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert "0 failures" in done.stdout
    assert "<td>shared memory</td>" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--nproc", "0"], "--nproc has to be a positive integer"),
        (["--gpus", "2", "--nproc", "3"], "Each rank has one GPU, but --nproc is 3 and --gpus"),
        (["--rank-ports", "many"], "--rank-ports is a range of ports"),
        (["--master", "local[2]"], "--cluster is missing"),
        (["--cluster", "--master", "yarnn"], "not a Spark master URL"),
        (["--nprocs", "2"], "--nproc"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], error: str) -> None:
    command = [sys.executable, "-m", "distributor", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert error in done.stderr


def test_python_has_the_names_of_parameters() -> None:
    with pytest.raises(ValueError, match=r"^num_processes has to be a positive integer"):
        distributor.doctor(0)
    with pytest.raises(ValueError, match="num_processes is 3 and gpus is 2"):
        distributor.doctor(3, gpus=2)


@needs_java
def test_fixes_name_options() -> None:
    found = doctor("--cluster", "--master", "local[2]", "--gpus", "2").having("failure")
    assert list(found) == ["GPUs"], found
    assert "leave out --gpus" in found["GPUs"]["found"]


def test_a_session_is_needed_for_a_cluster(run_driver: Callable[..., object]) -> None:
    source = """
        import distributor
        try:
            distributor.doctor(local_mode=False)
        except RuntimeError as error:
            assert "pass local_mode=True" in str(error)
        else:
            raise AssertionError("no error")
    """
    assert run_driver(source)


def failed(name: str, *arguments: str, inside: list[str] | None = None, **env: str) -> str:
    """Return what the one failed check of this name found, and its fix."""
    found = doctor(*arguments, env=env, inside=inside or [])
    assert found.exit_code == 1
    assert list(found.having("failure")) == [name], found.text
    assert ("run" in found.having("ok")) == (name == "storage"), "ranks do not need storage"
    check = found.having("failure")[name]
    assert check["where"] == "this machine"
    return f"{check['found']} {check['fix']}"


def test_gpus_that_are_missing() -> None:
    if distributor.core.gpus.gpu_names():
        pytest.skip("there are GPUs")
    text = failed("GPUs", "--gpus", "2")
    assert text.startswith("2 GPUs wanted, and there is no GPU: no NVIDIA driver answers")
    assert "On a machine without GPUs, leave out --gpus." in text


def machine(**parts: Any) -> Machine:
    """Return this machine with other parts."""
    return replace(examine("localhost"), **parts)


CPU_BUILD, CUDA_BUILD = {"torch": "2.9.0+cpu"}, {"torch": "2.9.0", "CUDA": "12.8"}
NEWER_CUDA = {"torch": "2.9.0", "CUDA": "13.0"}
DRIVER = {"driver": DriverVersion("570.1", "12.8"), "gpus": ("H100", "H100")}
NO_DRIVER: dict[str, Any] = {"driver": None, "gpus": ()}


@pytest.mark.parametrize(
    ("versions", "parts", "gpus", "expected"),
    [
        (CPU_BUILD, NO_DRIVER, 0, {"GPUs": "ok"}),
        (CUDA_BUILD, NO_DRIVER, 0, {"GPUs": "ok"}),
        (CPU_BUILD, NO_DRIVER, 2, {"GPUs": "failure"}),
        (CUDA_BUILD, NO_DRIVER, 2, {"GPUs": "failure"}),
        (CPU_BUILD, DRIVER, 2, {"GPUs": "ok", "CUDA": "failure"}),
        (NEWER_CUDA, DRIVER, 2, {"GPUs": "ok", "CUDA": "failure"}),
        (CUDA_BUILD, DRIVER, 2, {"GPUs": "ok", "CUDA": "ok"}),
        (CUDA_BUILD, DRIVER, 3, {"GPUs": "failure", "CUDA": "ok"}),
    ],
)
def test_a_machine_without_gpus_has_one_row_for_them(
    versions: dict[str, str], parts: dict[str, Any], gpus: int, expected: dict[str, str]
) -> None:
    found = machine(versions={"Python": "3.12.1", **versions}, **parts)

    rows = {check.name: check.status.value for check in machine_checks(found, gpus)}

    assert {name: rows[name] for name in ("GPUs", "CUDA") if name in rows} == expected


@needs_mounts
def test_little_shared_memory() -> None:
    mount = ["unshare", "--mount", "sh", "-c"]
    mount += ['mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh"]
    text = failed("shared memory", inside=mount)
    assert "8.39 MB of 8.39 MB free in /dev/shm" in text
    assert "--shm-size" in text


@needs_mounts
def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 20) as disk:
        text = failed("disk", TMPDIR=str(disk))
    assert f"free in {disk}" in text
    assert "TMPDIR" in text


def test_little_address_space() -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("there is no prlimit")
    text = failed("memory", inside=["prlimit", f"--as={2**30}"])
    assert "RLIMIT_AS" in text


def test_storage_that_does_not_exist(tmp_path: Path) -> None:
    text = failed("storage", "--storage", str(tmp_path / "missing"))
    assert f"{tmp_path / 'missing'}: there is no such folder" in text


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
"""


def test_no_torch(tmp_path: Path) -> None:
    python = python_that_begins(tmp_path / "python", WITHOUT_TORCH)
    done = subprocess.run(
        [str(python), "-m", "distributor", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    [torch] = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "torch"]
    assert torch["status"] == "failure"
    assert "has no torch" in torch["found"]


def test_no_java(tmp_path: Path) -> None:
    empty = {"PATH": str(tmp_path), "JAVA_HOME": ""}

    found = doctor("--cluster", "--master", "local[2]", env=empty)

    assert found.exit_code == 1
    assert list(found.having("failure")) == ["Java"], found.text
    assert f"Install Java {NEEDED_JAVA}" in found.having("failure")["Java"]["fix"]
    assert set(UNREACHED) <= found.having("not checked").keys()
    assert not set(UNREACHED) & found.having("ok").keys()


def test_an_old_java(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{OLD_JAVA}\"' >&2\n")
    java.chmod(0o755)

    found = doctor("--cluster", "--master", "local[2]", env={"JAVA_HOME": str(tmp_path)})

    assert found.exit_code == 1
    assert f"Java {OLD_JAVA}" in found.having("failure")["Java"]["found"]


@needs_java
def test_a_master_that_does_not_answer() -> None:
    found = doctor("--cluster", "--master", f"spark://127.0.0.1:{free_port()}")

    assert found.exit_code == 1
    assert list(found.having("failure")) == ["Spark"], found.text
    assert "No Spark master answers" in found.having("failure")["Spark"]["found"]
    assert set(UNREACHED) <= found.having("not checked").keys()
