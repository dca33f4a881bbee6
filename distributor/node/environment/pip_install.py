"""Requirements: a virtual environment that pip fills once per node."""

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
"""Lines of pip's that an error has; the last ones say why."""
PACKAGES = ("site-packages", "dist-packages")
PIP = """
import os, runpy, signal, threading

parent = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what pip starts has nobody to ask

def end_with_parent():
    os.read(parent, 1)  # it says nothing: this is its end, or its word that it waits no longer
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""``python -m pip`` that does not outlive who waits for it, nor does what it builds with."""


def installed_requirements(
    requirements: Sequence[str], variables: Mapping[str, str], deadline: float
) -> AbstractContextManager[Path]:
    """Use a virtual environment with these requirements; the first that asks has it made.

    What this interpreter has installed is there too, for torch is not to be installed again.

    Parameters
    ----------
    requirements : sequence of str
        As pip takes them.
    variables : mapping of str to str
        The environment of pip.
    deadline : float
        When, by ``time.monotonic``, it must be there.

    Raises
    ------
    ExecutorNotReady
        Where pip fails; with its last lines.
    StartTimeout
        Where the deadline passed.
    """

    def make(folder: Path, lock: int) -> None:
        import venv

        venv.create(folder, symlinks=True)
        _show_installed(folder)
        _install(folder, requirements, variables, lock, deadline)

    name = f"requirements-{_digest(requirements)}"
    return build_once(cache_folder(variables) / name, make, deadline)


def _digest(requirements: Sequence[str]) -> str:
    made_of = [sorted(requirements), sys.version, sys.prefix, platform.platform(), _folders()]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]


def _folders() -> list[str]:
    """List the folders in which this interpreter finds what is installed."""
    return [entry for entry in sys.path if Path(entry).name in PACKAGES]


def site_packages_of(folder: Path) -> Path:
    """Give the folder of a virtual environment's own packages."""
    scheme = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", "posix_prefix", scheme))


def _show_installed(folder: Path) -> None:
    """Have the environment see, behind its own packages, this interpreter's."""
    line = f"import site; list(map(site.addsitedir, {_folders()!r}))\n"
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
            [python, "-I", "-c", PIP, "install", *options, *requirements],
            variables,
            output,
            lock,
            deadline,
        )
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if returncode is None:
        raise StartTimeout(
            f"After start_timeout, pip on {host_name()} still installs {', '.join(requirements)}."
        )
    if returncode:
        # Spark writes the error to its event log, and pip may have printed a password.
        raise ExecutorNotReady(Redaction(variables).of_text(_told(requirements, lines)))


def _run_pip(
    command: Sequence[str],
    variables: Mapping[str, str],
    output: BinaryIO,
    lock: int,
    deadline: float,
) -> int | None:
    """Give pip's exit code; None where it has not ended in time."""
    with subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.PIPE,  # nobody else has its other end
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=[lock],  # should this process be killed, the next one waits until pip has ended
        start_new_session=True,
    ) as process:
        seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
    return None


def _told(requirements: Sequence[str], lines: list[str]) -> str:
    listed = ", ".join(requirements)
    what = f"On {host_name()} pip of {sys.executable} could not install {listed}."
    last = [line.rstrip() for line in lines if line.strip()][-TAIL_LINES:]
    # Indented lines are what Spark's message of a failed task is read on with.
    return "\n    ".join(
        [f"{what} Its indexes are set by pip.conf there or PIP_* variables (env=). It said:", *last]
    )
