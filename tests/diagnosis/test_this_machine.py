"""`distributor doctor` on this machine: sound, and with each thing really broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyspark
import pytest
from conftest import needs_java
from support.doctor import doctor
from support.machines import small_disk, why_not_mounted
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


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--gpus", "2", "--nproc", "3"], "Each rank has one GPU, but --nproc is 3 and --gpus"),
        (["--master", "local[2]"], "--cluster is missing"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], error: str) -> None:
    command = [sys.executable, "-m", "distributor", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert error in done.stderr


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
        (CUDA_BUILD, NO_DRIVER, 0, {"GPUs": "ok"}),
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
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="there is no prlimit")
@pytest.mark.skipif(bool(distributor.core.gpus.gpu_names()), reason="there are GPUs")
def test_each_fault_of_a_machine_is_named(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "sh", "-c"]
    inside += ['mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh"]
    inside += ["prlimit", f"--as={2**30}"]
    missing = str(tmp_path / "missing")
    with small_disk(tmp_path / "disk", 20) as disk:
        variables = {"TMPDIR": str(disk)}
        report = doctor("--gpus", "2", "--storage", missing, env=variables, inside=inside)

    assert report.exit_code == 1
    faults = report.having("failure")
    assert {each["where"] for each in faults.values()} == {"this machine"}
    texts = {name: f"{each['found']} {each['fix']}" for name, each in faults.items()}
    expected = {
        "shared memory": ["8.39 MB of 8.39 MB free in /dev/shm", "--shm-size"],
        "disk": [f"free in {disk}", "TMPDIR"],
        "memory": ["RLIMIT_AS"],
        "storage": [f"{missing}: there is no such folder"],
        "GPUs": ["there is no GPU: no NVIDIA driver answers", "leave out --gpus"],
    }
    assert texts.keys() == expected.keys(), report.text
    for name, parts in expected.items():
        assert all(part in texts[name] for part in parts), texts[name]
    assert "run" in report.having("not checked"), "ranks would fail for these reasons"


@pytest.mark.parametrize("java", ["", OLD_JAVA], ids=["none", "old"])
def test_a_java_that_spark_cannot_use(tmp_path: Path, java: str) -> None:
    variables = {"PATH": str(tmp_path), "JAVA_HOME": ""}
    if java:
        program = tmp_path / "bin" / "java"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho 'openjdk version \"{java}\"' >&2\n")
        program.chmod(0o755)
        variables = {"JAVA_HOME": str(tmp_path)}

    found = doctor("--cluster", "--master", "local[2]", env=variables)

    assert found.exit_code == 1
    [(name, check)] = found.having("failure").items()
    assert name == "Java"
    assert f"Install Java {NEEDED_JAVA}" in check["fix"]
    assert f"Java {java}" in check["found"] or not java
    assert set(UNREACHED) <= found.having("not checked").keys()


@needs_java
def test_a_master_that_does_not_answer() -> None:
    found = doctor("--cluster", "--master", f"spark://127.0.0.1:{free_port()}")

    assert found.exit_code == 1
    assert list(found.having("failure")) == ["Spark"], found.text
    assert "No Spark master answers" in found.having("failure")["Spark"]["found"]
    assert set(UNREACHED) <= found.having("not checked").keys()
