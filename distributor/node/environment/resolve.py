"""Resolves an environment on this node to the interpreter that ranks run with.

The environment was packed elsewhere, or uv or pip installs it here, once per node. Its interpreter
has packages of its own. From this process it gets this package and cloudpickle, which must be the
same at both ends of a pickle, ahead of its own packages; and what else a rank imports, behind them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from distributor.core.addresses import host_name
from distributor.core.versions import Software, pickling_software
from distributor.errors import ExecutorNotReady
from distributor.node.environment.cache import CacheLimits, build_once, cache_folder, trim
from distributor.node.environment.installer import install
from distributor.node.process.spawner import Interpreter

FIRST_MODULES = ("distributor", "cloudpickle")  # of this process, in place of the environment's
LAST_MODULES = ("threadpoolctl",)  # of this process, if the environment lacks them
PROBE_SECONDS = 60.0  # that an environment's interpreter has to describe itself
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
PATH_VARIABLE = "PYTHONPATH"
# By these, Spark's Python finds its modules; an empty value has no effect.
NOT_INHERITED = {PATH_VARIABLE: "", "PYTHONHOME": ""}
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
    install_variables = {**variables, **NOT_INHERITED}
    with _installed_requirements(requirements, install_variables, deadline) as folder:
        compared = (str(_site_packages_of(folder)),)
        with use_packed(folder, variables, deadline, module_folders, compared) as prepared:
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
        trim(cache_folder(variables), CacheLimits.of(variables))
        path = [*first, *module_folders, *description["path"], *last]
        inherited = variables.get(PATH_VARIABLE, "").split(os.pathsep)
        interpreter = Interpreter(
            executable=str(executable),
            path=tuple(dict.fromkeys(path)),
            variables={
                **NOT_INHERITED,
                PATH_VARIABLE: os.pathsep.join(e for e in inherited if e in module_folders),
                "VIRTUAL_ENV": str(folder),
                "PATH": os.pathsep.join(
                    [str(executable.parent), variables.get("PATH", os.defpath)]
                ),
            },
        )
        yield PreparedEnvironment(interpreter, {**description["software"], **pickling_software()})


@functools.cache
def _describe(executable: str, folders: tuple[str, ...]) -> dict[str, Any]:
    """Have an interpreter report its ``path``, and its ``software`` with the folders' packages."""
    try:
        done = subprocess.run(
            [executable, "-I", "-c", PROBE_PROGRAM, *folders],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
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


def _installed_requirements(
    requirements: Sequence[str], variables: Mapping[str, str], deadline: float
) -> AbstractContextManager[Path]:
    """Use a virtual environment with these requirements; the first caller on a node creates it."""

    def build(folder: Path, lock: int) -> None:
        import venv

        venv.create(folder, symlinks=True)
        # This interpreter's packages are on the path too, behind the environment's own, so that
        # torch is not installed again.
        line = f"import site; list(map(site.addsitedir, {package_folders!r}))\n"
        (_site_packages_of(folder) / "distributor-base.pth").write_text(line)
        python, packages = folder / "bin" / "python", _site_packages_of(folder)
        install(python, packages, package_folders, requirements, variables, lock, deadline)

    package_folders = [entry for entry in sys.path if Path(entry).name in PACKAGE_FOLDERS]
    content = [
        sorted(requirements), sys.version, sys.prefix, platform.platform(), package_folders
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return build_once(cache_folder(variables) / f"requirements-{digest}", build, deadline)


def _site_packages_of(folder: Path) -> Path:
    scheme = {"base": str(folder), "platbase": str(folder)}
    return Path(sysconfig.get_path("purelib", "posix_prefix", scheme))
