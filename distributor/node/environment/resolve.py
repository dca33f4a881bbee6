"""Resolves an environment on this node to the interpreter that ranks run with.

The interpreter has packages of its own. From this process it gets this package and cloudpickle,
which must be the same at both ends of a pickle, ahead of its own packages; and what else a rank
imports, behind its own packages.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from distributor.core.host import host_name
from distributor.core.versions import Software, pickling_software
from distributor.errors import ExecutorNotReady
from distributor.node.environment.build_once import build_once, cache_folder
from distributor.node.environment.cache import CacheLimits, trim
from distributor.node.environment.pip_install import installed_requirements, site_packages_of
from distributor.node.process.interpreter import Interpreter

FIRST_MODULES = ("distributor", "cloudpickle")
"""Modules of this process that replace the environment's."""
LAST_MODULES = ("threadpoolctl",)
"""Modules of this process that ranks use if the environment lacks them."""
PROBE_SECONDS = 60.0
"""Seconds that an environment's interpreter has to describe itself."""
PATH_VARIABLE = "PYTHONPATH"
NOT_INHERITED = {PATH_VARIABLE: "", "PYTHONHOME": ""}
"""Variables by which Spark's Python finds its modules; an empty value has no effect."""
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
"""Has an interpreter describe itself; its arguments are folders whose packages it should list."""


class PreparedEnvironment(NamedTuple):
    """An environment that is ready for ranks on this node.

    Parameters
    ----------
    interpreter : Interpreter
        The interpreter of the ranks.
    software : Software
        Its versions of the software that all nodes must have in common.
    """

    interpreter: Interpreter
    software: Software


def use_packed(
    folder: Path, variables: Mapping[str, str], deadline: float, module_folders: Sequence[str] = ()
) -> AbstractContextManager[PreparedEnvironment]:
    """Use an environment that was packed elsewhere and is unpacked on this node.

    Parameters
    ----------
    folder : Path
        The folder with the unpacked environment.
    variables : mapping of str to str
        The environment variables of its ranks, as far as they are known.
    deadline : float
        When, by ``time.monotonic``, it must be ready.
    module_folders : sequence of str
        Folders with the user's modules, which are searched before the environment's own.

    Returns
    -------
    context manager of PreparedEnvironment
        Within its context, what the environment uses of the node's cache is not removed.

    Raises
    ------
    ExecutorNotReady
        If its interpreter does not run, or is another version of Python than this one.
    """
    return _prepare(folder, (), variables, deadline, module_folders)


@contextlib.contextmanager
def use_requirements(
    requirements: Sequence[str],
    variables: Mapping[str, str],
    deadline: float,
    module_folders: Sequence[str] = (),
) -> Iterator[PreparedEnvironment]:
    """Use an environment that pip installs on this node; all nodes must get the same versions.

    Parameters
    ----------
    requirements : sequence of str
        Requirements as pip takes them.
    variables, deadline, module_folders
        As for `use_packed`.

    Yields
    ------
    PreparedEnvironment
        The environment; within the context, it is not removed from the node's cache.

    Raises
    ------
    ExecutorNotReady
        If pip fails.
    StartTimeout
        If the deadline has passed.
    """
    with installed_requirements(requirements, {**variables, **NOT_INHERITED}, deadline) as folder:
        compared = (str(site_packages_of(folder)),)
        with _prepare(folder, compared, variables, deadline, module_folders) as prepared:
            yield prepared


@contextlib.contextmanager
def _prepare(
    folder: Path,
    compared: tuple[str, ...],
    variables: Mapping[str, str],
    deadline: float,
    module_folders: Sequence[str],
) -> Iterator[PreparedEnvironment]:
    """Prepare an environment; nodes compare the versions of packages in the compared folders."""
    executable = folder / "bin" / "python"
    description = _describe(str(executable), compared)
    with (
        _folders_with(FIRST_MODULES, variables, deadline) as first,
        _folders_with(LAST_MODULES, variables, deadline) as last,
    ):
        trim(cache_folder(variables), CacheLimits.of(variables))
        path = [*first, *module_folders, *description["path"], *last]
        interpreter = _interpreter(executable, path, variables, module_folders)
        yield PreparedEnvironment(interpreter, {**description["software"], **pickling_software()})


def _interpreter(
    executable: Path,
    path: Sequence[str],
    variables: Mapping[str, str],
    module_folders: Sequence[str],
) -> Interpreter:
    search = os.pathsep.join([str(executable.parent), variables.get("PATH", os.defpath)])
    inherited = variables.get(PATH_VARIABLE, "").split(os.pathsep)
    python_path = os.pathsep.join(entry for entry in inherited if entry in module_folders)
    return Interpreter(
        executable=str(executable),
        path=tuple(dict.fromkeys(path)),
        variables={
            **NOT_INHERITED,
            PATH_VARIABLE: python_path,
            "VIRTUAL_ENV": str(executable.parent.parent),
            "PATH": search,
        },
    )


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
