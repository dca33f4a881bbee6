"""Installs requirements: a virtual environment that pip fills once per node."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from distributor.core.host import host_name
from distributor.core.redaction import Redaction
from distributor.errors import ExecutorNotReady, StartTimeout
from distributor.node.environment.build_once import build_once, cache_folder

TAIL_LINES = 12
"""How many lines of pip's output an error has; the last ones contain the reason."""
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
PIP_PROGRAM = """
import os, runpy, signal, threading

parent = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that pip's children do not wait for input

def end_with_parent():
    os.read(parent, 1)  # returns once the parent closes the pipe or dies: it never writes
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""Runs like ``python -m pip``, but pip and its build processes do not outlive their parent."""


def installed_requirements(
    requirements: Sequence[str], variables: Mapping[str, str], deadline: float
) -> AbstractContextManager[Path]:
    """Use a virtual environment with these requirements; the first caller on a node creates it.

    Packages of this interpreter are visible in it too, so that torch is not installed again.

    Parameters
    ----------
    requirements : sequence of str
        Requirements as pip takes them.
    variables : mapping of str to str
        The environment variables of pip.
    deadline : float
        When, by ``time.monotonic``, the environment must be complete.

    Returns
    -------
    context manager of Path
        Yields the environment's folder, which is not removed within the context.

    Raises
    ------
    ExecutorNotReady
        If pip fails; the error contains the last lines of its output.
    StartTimeout
        If the deadline has passed.
    """

    def build(folder: Path, lock: int) -> None:
        import venv

        venv.create(folder, symlinks=True)
        _add_base_packages(folder)
        _install(folder, requirements, variables, lock, deadline)

    name = f"requirements-{_digest(requirements)}"
    return build_once(cache_folder(variables) / name, build, deadline)


def _digest(requirements: Sequence[str]) -> str:
    content = [
        sorted(requirements), sys.version, sys.prefix, platform.platform(), _package_folders()
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _package_folders() -> list[str]:
    """List the folders with the installed packages of this interpreter."""
    return [entry for entry in sys.path if Path(entry).name in PACKAGE_FOLDERS]


def site_packages_of(folder: Path) -> Path:
    """Return the folder of a virtual environment's own packages."""
    scheme = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", "posix_prefix", scheme))


def _add_base_packages(folder: Path) -> None:
    """Put this interpreter's packages on the environment's path, behind its own."""
    line = f"import site; list(map(site.addsitedir, {_package_folders()!r}))\n"
    (site_packages_of(folder) / "distributor-base.pth").write_text(line)


def _install(
    folder: Path,
    requirements: Sequence[str],
    variables: Mapping[str, str],
    lock: int,
    deadline: float,
) -> None:
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    python = str(folder / "bin" / "python")
    with tempfile.TemporaryFile() as output:
        returncode = _run_pip(
            [python, "-I", "-c", PIP_PROGRAM, "install", *options, *requirements],
            variables,
            output,
            lock,
            deadline,
        )
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if returncode is None:
        raise StartTimeout(
            f"start_timeout has passed, and pip on {host_name()} is still installing "
            f"{', '.join(requirements)}."
        )
    if returncode:
        # Spark writes the error to its event log, and pip may have printed a password.
        raise ExecutorNotReady(Redaction(variables).of_text(_describe_failure(requirements, lines)))


def _run_pip(
    command: Sequence[str],
    variables: Mapping[str, str],
    output: BinaryIO,
    lock: int,
    deadline: float,
) -> int | None:
    """Return pip's exit code; None if it has not finished in time, and then it is killed."""
    with subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.PIPE,  # only this process has the other end
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=[lock],  # if this process is killed, the next one waits until pip has ended
        start_new_session=True,
    ) as process:
        seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
    return None


def _describe_failure(requirements: Sequence[str], lines: list[str]) -> str:
    summary = (
        f"On {host_name()} pip of {sys.executable} could not install {', '.join(requirements)}. "
        "Set its package indexes in pip.conf there or by PIP_* variables (env=). Its last lines:"
    )
    last_lines = [line.rstrip() for line in lines if line.strip()][-TAIL_LINES:]
    # The error is read from Spark's message of a failed task, in which indented lines belong to it.
    return "\n    ".join([summary, *last_lines])
