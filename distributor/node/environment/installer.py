"""Installs requirements into an environment on this node, with uv or pip."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from distributor.core.addresses import host_name
from distributor.core.text import Redaction
from distributor.errors import ExecutorNotReady, StartTimeout

OPTIONS_SECONDS = 60.0
"""Seconds for pip to list its options."""
TAIL_LINES = 12  # of the installer's output, in an error: the last ones contain the reason
# Variables by which uv finds packages.
UV_SOURCES = (
    "UV_CONFIG_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX",
    "UV_INDEX_URL", "UV_NO_INDEX", "UV_OFFLINE",
)  # fmt: skip
# Options of pip that do not matter to uv.
_OPTIONS_OF_PIP_ALONE = {
    "break-system-packages", "cache-dir", "config-file", "default-timeout",
    "disable-pip-version-check", "no-cache-dir", "no-color", "no-input",
    "no-python-version-warning", "progress-bar", "quiet", "require-virtualenv", "retries",
    "root-user-action", "timeout", "user", "verbose",
}  # fmt: skip
_OF_BASE = "distributor"  # the INSTALLER of a description that is no package's own
# Runs a command, which does not outlive this program's parent, and nor do its build processes.
PROGRAM = """
import os, signal, subprocess, sys, threading

def end_with_parent():
    os.read(0, 1)  # returns once the parent closes the pipe or dies: it never writes
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False))
"""


class Installer(NamedTuple):
    """A program that installs packages.

    Parameters
    ----------
    name : str
        Its name in messages.
    command : tuple of str
        The command line, which requirements follow.
    configured_by : str
        Where its package indexes are set.
    """

    name: str
    command: tuple[str, ...]
    configured_by: str


def install(
    python: Path,
    site_packages: Path,
    base_folders: Sequence[str],
    requirements: Sequence[str],
    variables: Mapping[str, str],
    lock: int,
    deadline: float,
) -> None:
    """Install requirements that the packages in the base folders do not satisfy.

    uv does so if this node has it, unless pip is configured here and uv is not: uv does not read
    pip's configuration, and could take a package from elsewhere. If uv fails, pip tries, unless
    only uv is configured.

    Parameters
    ----------
    python : Path
        The environment's interpreter, whose pip is that of the base folders.
    site_packages : Path
        The environment's own, still empty.
    base_folders : sequence of str
        Folders of packages that the interpreter finds too.
    requirements : sequence of str
        As pip takes them.
    variables : mapping of str to str
        The installer's environment variables.
    lock : int
        A descriptor that the installer inherits.
    deadline : float
        On the monotonic clock, in seconds.

    Raises
    ------
    ExecutorNotReady
        If the requirements cannot be installed.
    StartTimeout
        At the deadline.
    """
    prefers_uv = any(variables.get(name) for name in UV_SOURCES)
    uv = shutil.which("uv", path=_places(variables))
    if uv and (prefers_uv or not _pip_options(python, variables) - _OPTIONS_OF_PIP_ALONE):
        with _described(base_folders, site_packages), contextlib.ExitStack() as tolerated:
            if not prefers_uv:
                tolerated.enter_context(contextlib.suppress(ExecutorNotReady))
            _run(_uv(uv, python), requirements, variables, lock, deadline)
            return
    _run(_pip(python), requirements, variables, lock, deadline)


def _places(variables: Mapping[str, str]) -> str:
    """Return the folders of ``PATH``, and the one in which pip installs uv for this Python."""
    return os.pathsep.join([variables.get("PATH", os.defpath), os.path.dirname(sys.executable)])


def _uv(executable: str, python: Path) -> Installer:
    options = ("--no-progress", "--color", "never", "--python", str(python))
    return Installer("uv", (executable, "pip", "install", *options), "by UV_* variables (env=)")


def _pip(python: Path) -> Installer:
    options = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
    return Installer(
        f"pip of {sys.executable}",
        (str(python), "-I", "-m", "pip", "install", *options),
        "in pip.conf there or by PIP_* variables (env=)",
    )


def _pip_options(python: Path, variables: Mapping[str, str]) -> set[str]:
    """Return the names of pip's options that are set, in its files or by variables."""
    command = [str(python), "-I", "-m", "pip", "config", "list"]
    try:
        listed = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=OPTIONS_SECONDS,
        ).stdout
    except subprocess.TimeoutExpired:  # of a file system that hangs, say; pip then reports it
        return set()
    return set(re.findall(r"^[^\s=]*\.([\w-]+)=", listed, re.MULTILINE))


@contextlib.contextmanager
def _described(base_folders: Sequence[str], site_packages: Path) -> Iterator[None]:
    """Let an environment list the packages in the base folders, which uv would not look into.

    A description is the package's metadata without its files, so that uv can replace it.
    """
    folders = []
    for name, found in _first_of_each(base_folders).items():
        folder = site_packages / f"{name}-{found.version}.dist-info"
        folder.mkdir()
        content = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
        (folder / "METADATA").write_text(content, encoding="utf-8")
        (folder / "INSTALLER").write_text(_OF_BASE)
        files = ("METADATA", "INSTALLER", "RECORD")
        (folder / "RECORD").write_text("".join(f"{folder.name}/{file},,\n" for file in files))
        folders.append(folder)
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):  # uv has replaced it
                if (folder / "INSTALLER").read_text() == _OF_BASE:
                    shutil.rmtree(folder)


def _first_of_each(folders: Sequence[str]) -> dict[str, metadata.Distribution]:
    """Return the distribution that an import would use, for each name as in a folder's name."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions(path=list(folders)):
        if each.metadata["Name"] and each.metadata["Version"]:
            found.setdefault(re.sub(r"[-_.]+", "_", each.metadata["Name"]).lower(), each)
    return found


def _run(
    installer: Installer,
    requirements: Sequence[str],
    variables: Mapping[str, str],
    lock: int,
    deadline: float,
) -> None:
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            [sys.executable, "-I", "-c", PROGRAM, *installer.command, *requirements],
            env=variables,
            stdin=subprocess.PIPE,  # only this process has the other end
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],  # if this process is killed, the next one waits until this has ended
            start_new_session=True,
        ) as process:
            seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            returncode = process.poll()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if returncode is None:
        raise StartTimeout(
            f"start_timeout has passed, and {installer.name.split()[0]} on {host_name()} is still "
            f"installing {', '.join(requirements)}."
        )
    if returncode:
        # Spark writes the error to its event log, and the output may have a password.
        message = _failure(installer, requirements, lines)
        raise ExecutorNotReady(Redaction(variables).of_text(message))


def _failure(installer: Installer, requirements: Sequence[str], lines: Sequence[str]) -> str:
    summary = (
        f"On {host_name()} {installer.name} could not install {', '.join(requirements)}. "
        f"Set its package indexes {installer.configured_by}. Its last lines:"
    )
    last_lines = [line.rstrip() for line in lines if line.strip()][-TAIL_LINES:]
    # The error is read from Spark's message of a failed task, in which indented lines belong to it.
    return "\n    ".join([summary, *last_lines])
