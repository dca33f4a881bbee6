"""The interpreter and packages that ranks run with, made ready on a node.

The environment was packed elsewhere, or uv or pip installs it here, once per node. Its interpreter
has packages of its own. From this process it gets this package and cloudpickle, which must be the
same at both ends of a pickle, ahead of its own packages; and what else a rank imports, behind them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from distributor.core.addresses import host_name
from distributor.core.module_search import PACKAGE_FOLDERS
from distributor.core.text import Redaction
from distributor.core.versions import Software, pickling_software
from distributor.errors import ExecutorNotReady, StartTimeout
from distributor.node.cache import build_once, cache_folder, trim
from distributor.node.process.supervisor import Interpreter

FIRST_MODULES = ("distributor", "cloudpickle")  # of this process, in place of the environment's
LAST_MODULES = ("threadpoolctl",)  # of this process, if the environment lacks them
PROBE_SECONDS = 60.0  # that an environment's interpreter has to describe itself
PATH_VARIABLE = "PYTHONPATH"
# By these, Spark's Python finds its modules; an empty value has no effect.
NOT_INHERITED = {PATH_VARIABLE: "", "PYTHONHOME": ""}
OPTIONS_SECONDS = 60.0  # for pip to list its options
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
# Has an interpreter describe itself; its arguments are folders whose packages it should list.
PROBE_PROGRAM = """
import json, sys
from importlib import metadata

found = {each.name: each.version for each in metadata.distributions(path=sys.argv[1:])}
try:
    found["torch"] = metadata.version("torch")
except metadata.PackageNotFoundError:
    pass
version = "{}.{}".format(*sys.version_info)
print("\\n" + json.dumps({"path": sys.path, "version": version, "software": found}))
"""


# Runs a command, which does not outlive this program's parent, and nor do its build processes.
INSTALLER_PROGRAM = """
import os, signal, subprocess, sys, threading

def end_with_parent():
    os.read(0, 1)  # returns once the parent closes the pipe or dies: it never writes
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False))
"""


class PreparedEnvironment(NamedTuple):
    """The interpreter of the ranks, and its versions of what all nodes must have in common."""

    interpreter: Interpreter
    software: Software


@contextlib.contextmanager
def use_requirements(
    requirements: Sequence[str],
    variables: Mapping[str, str],
    deadline: float,
    module_folders: Sequence[str] = (),
) -> Iterator[PreparedEnvironment]:
    """Use an environment that is installed on this node; all nodes must get the same versions."""

    def build(folder: Path, lock: int) -> None:
        import venv

        venv.create(folder, symlinks=True)
        # This interpreter's packages are on the path too, behind the environment's own, so that
        # torch is not installed again.
        line = f"import site; list(map(site.addsitedir, {package_folders!r}))\n"
        (_site_packages_of(folder) / "distributor-base.pth").write_text(line)
        install_variables = {**variables, **NOT_INHERITED}
        _install(folder, package_folders, requirements, install_variables, lock, deadline)

    package_folders = [entry for entry in sys.path if Path(entry).name in PACKAGE_FOLDERS]
    content = [
        sorted(requirements), sys.version, sys.prefix, platform.platform(), package_folders
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    folder = cache_folder(variables) / f"requirements-{digest}"
    compared = (str(_site_packages_of(folder)),)
    with (
        build_once(folder, build, deadline),
        use_packed(folder, variables, deadline, module_folders, compared) as prepared,
    ):
        yield prepared


@contextlib.contextmanager
def use_packed(
    folder: Path,
    variables: Mapping[str, str],
    deadline: float,
    module_folders: Sequence[str] = (),
    compared: tuple[str, ...] = (),
) -> Iterator[PreparedEnvironment]:
    """Use an environment on this node; what it uses of the cache is not removed meanwhile.

    Folders with the user's modules come before the environment's own; nodes compare the versions of
    the packages in the compared folders.
    """
    executable = folder / "bin" / "python"
    description = _describe(str(executable), compared)
    with (
        _folders_with(FIRST_MODULES, variables, deadline) as first,
        _folders_with(LAST_MODULES, variables, deadline) as last,
    ):
        trim(cache_folder(variables), variables)
        path = [*first, *module_folders, *description["path"], *last]
        inherited = variables.get(PATH_VARIABLE, "").split(os.pathsep)
        commands = [str(executable.parent), variables.get("PATH", os.defpath)]
        interpreter = Interpreter(
            executable=str(executable),
            path=tuple(dict.fromkeys(path)),
            variables={
                **NOT_INHERITED,
                PATH_VARIABLE: os.pathsep.join(e for e in inherited if e in module_folders),
                "VIRTUAL_ENV": str(folder),
                "PATH": os.pathsep.join(commands),
            },
        )
        yield PreparedEnvironment(interpreter, {**description["software"], **pickling_software()})


@functools.cache
def _describe(executable: str, folders: tuple[str, ...]) -> dict[str, Any]:
    """Have an interpreter report its ``path``, and its ``software`` with the folders' packages."""
    try:
        done = _run_python(executable, ["-c", PROBE_PROGRAM, *folders], PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_running(executable, str(error)) from None
    if done.returncode:
        raise _not_running(executable, done.stderr.strip().rpartition("\n")[2])
    description: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    ours = pickling_software()["Python"]
    if (theirs := description["version"]) != ours:
        raise ExecutorNotReady(
            f"On {host_name()} the environment's interpreter {_with_target(executable)} is Python "
            f"{theirs}, but {sys.executable}, which starts it, is Python {ours}. They cannot load "
            f"each other's pickles: create the environment with Python {ours}."
        )
    return description


def _run_python(
    executable: str,
    arguments: Sequence[str],
    seconds: float,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [executable, "-I", *arguments],
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def _not_running(executable: str, reason: str) -> ExecutorNotReady:
    return ExecutorNotReady(
        f"On {host_name()} the environment's interpreter {_with_target(executable)} does not "
        f"run: {reason}. An environment of venv-pack contains no interpreter: the one that it was "
        "created with must be at the same place on every node (or at the place that venv-pack's "
        "-p names), or pack the environment with conda-pack. A .zip that Spark has unpacked has "
        "lost its links: use a .tar.gz."
    )


def _with_target(executable: str) -> str:
    """Name an interpreter and, if it is a link, its target."""
    target = os.path.realpath(executable)
    return executable if target == executable else f"{executable} (a link to {target})"


@contextlib.contextmanager
def _folders_with(
    names: Sequence[str], variables: Mapping[str, str], deadline: float
) -> Iterator[list[str]]:
    """Yield entries for ``sys.path`` with some modules of this process, and with no others.

    An entry is a folder of links to the modules, or the archive that contains a module.
    """
    locations = [_location_of(name) for name in names]
    on_disk = [location for location in locations if location.exists()]
    archives = [str(location.parent) for location in locations if not location.exists()]

    def build(folder: Path, lock: int) -> None:
        for location in on_disk:
            (folder / location.name).symlink_to(location)

    digest = hashlib.sha256(os.fsencode("\0".join(map(str, on_disk)))).hexdigest()[:16]
    folder = cache_folder(variables) / f"modules-{digest}"
    with contextlib.ExitStack() as stack:
        linked = [stack.enter_context(build_once(folder, build, deadline))] if on_disk else []
        yield list(dict.fromkeys([*map(str, linked), *archives]))


def _location_of(name: str) -> Path:
    """Return a module's file, or a package's folder, without importing it."""
    spec = find_spec(name)
    assert spec is not None, "it is a requirement"
    locations = [*(spec.submodule_search_locations or []), spec.origin]
    return Path(str(locations[0])).absolute()


def _site_packages_of(folder: Path) -> Path:
    scheme = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", "posix_prefix", scheme))


def _install(
    folder: Path,
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
    """

    def run(installer: str, command: Sequence[str], configured_by: str) -> None:
        returncode, lines = _run([*command, *requirements], variables, lock, deadline)
        if returncode is None:
            raise StartTimeout(
                f"start_timeout has passed, and {installer.split()[0]} on {host_name()} is still "
                f"installing {', '.join(requirements)}."
            )
        if returncode:
            summary = (
                f"On {host_name()} {installer} could not install {', '.join(requirements)}. "
                f"Set its package indexes {configured_by}. Its last lines:"
            )
            # The error is read from Spark's message of a failed task, in which indented lines
            # belong to it. Spark writes it to its event log, and the output may have a password.
            message = "\n    ".join([summary, *lines[-TAIL_LINES:]])
            raise ExecutorNotReady(Redaction(variables).of_text(message))

    python = folder / "bin" / "python"
    prefers_uv = any(variables.get(name) for name in UV_SOURCES)
    # pip installs uv beside this Python.
    places = [variables.get("PATH", os.defpath), os.path.dirname(sys.executable)]
    uv = shutil.which("uv", path=os.pathsep.join(places))
    if uv and (prefers_uv or not _pip_options(python, variables) - _OPTIONS_OF_PIP_ALONE):
        tolerated = () if prefers_uv else (ExecutorNotReady,)
        with contextlib.suppress(*tolerated), _described(base_folders, _site_packages_of(folder)):
            options = ["--no-progress", "--color", "never", "--python", str(python)]
            run("uv", [uv, "pip", "install", *options], "by UV_* variables (env=)")
            return
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command = [str(python), "-I", "-m", "pip", "install", *options]
    where = "in pip.conf there or by PIP_* variables (env=)"
    run(f"pip of {sys.executable}", command, where)


def _run(
    command: Sequence[str], variables: Mapping[str, str], lock: int, deadline: float
) -> tuple[int | None, list[str]]:
    """Return the exit code of an installer, None at the deadline, and the lines that it printed."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            [sys.executable, "-I", "-c", INSTALLER_PROGRAM, *command],
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
    return returncode, [line.rstrip() for line in lines if line.strip()]


def _pip_options(python: Path, variables: Mapping[str, str]) -> set[str]:
    """Return the names of pip's options that are set, in its files or by variables."""
    try:
        done = _run_python(str(python), ["-m", "pip", "config", "list"], OPTIONS_SECONDS, variables)
    except subprocess.TimeoutExpired:  # of a file system that hangs, say; pip then reports it
        return set()
    return set(re.findall(r"^[^\s=]*\.([\w-]+)=", done.stdout, re.MULTILINE))


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
