"""Resolves an environment on this node to the interpreter that ranks run with.

Such an interpreter has its own packages. Of this one's it gets this package and what must be the
same at both ends of a pickle, before its own, and behind its own what else a rank imports.
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

FIRST, LAST = ("distributor", "cloudpickle"), ("threadpoolctl",)
"""What ranks have from here: whatever their environment has, and where it has none."""
PROBE_SECONDS = 60.0
PATH = "PYTHONPATH"
NOT_INHERITED = {PATH: "", "PYTHONHOME": ""}
"""Spark's Python finds its modules by these; empty they are as unset."""
PROBE = """
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
"""What an interpreter is asked; its arguments are folders whose packages it is to tell of."""


class PreparedEnvironment(NamedTuple):
    """An environment that ranks on this node can have.

    Parameters
    ----------
    interpreter : Interpreter
        What they run with.
    software : Software
        Versions in it of what all nodes must have in common.
    """

    interpreter: Interpreter
    software: Software


def use_packed(
    folder: Path, variables: Mapping[str, str], deadline: float, beside: Sequence[str] = ()
) -> AbstractContextManager[PreparedEnvironment]:
    """Make ready what was packed elsewhere, and use it as long as the context lasts.

    Parameters
    ----------
    folder : Path
        Where it lies on this node.
    variables : mapping of str to str
        The environment variables of its ranks, as far as they are known.
    deadline : float
        When, by ``time.monotonic``, it must be ready.
    beside : sequence of str
        Folders to be searched before its own: those of the user's modules.

    Raises
    ------
    ExecutorNotReady
        Where its interpreter does not run, or is another Python than this.
    """
    return _prepared(folder, (), variables, deadline, beside)


@contextlib.contextmanager
def use_requirements(
    requirements: Sequence[str],
    variables: Mapping[str, str],
    deadline: float,
    beside: Sequence[str] = (),
) -> Iterator[PreparedEnvironment]:
    """Make ready what pip installs, as `use_packed` does; nodes must have all of it in common.

    Parameters
    ----------
    requirements : sequence of str
        As pip takes them.
    variables, deadline, beside
        As `use_packed` has them.

    Raises
    ------
    ExecutorNotReady
        Where pip fails.
    StartTimeout
        Where the deadline passed.
    """
    with (
        installed_requirements(requirements, {**variables, **NOT_INHERITED}, deadline) as folder,
        _prepared(
            folder, (str(site_packages_of(folder)),), variables, deadline, beside
        ) as prepared,
    ):
        yield prepared


@contextlib.contextmanager
def _prepared(
    folder: Path,
    compared: tuple[str, ...],
    variables: Mapping[str, str],
    deadline: float,
    beside: Sequence[str],
) -> Iterator[PreparedEnvironment]:
    executable = folder / "bin" / "python"
    told = _described(str(executable), compared)
    with (
        _folders_with(FIRST, variables, deadline) as first,
        _folders_with(LAST, variables, deadline) as last,
    ):
        trim(cache_folder(variables), CacheLimits.of(variables))
        interpreter = _interpreter(
            executable, [*first, *beside, *told["path"], *last], variables, beside
        )
        yield PreparedEnvironment(interpreter, {**told["software"], **pickling_software()})


def _interpreter(
    executable: Path, path: Sequence[str], variables: Mapping[str, str], beside: Sequence[str]
) -> Interpreter:
    search = os.pathsep.join([str(executable.parent), variables.get("PATH", os.defpath)])
    inherited = variables.get(PATH, "").split(os.pathsep)
    kept = os.pathsep.join(entry for entry in inherited if entry in beside)
    folder = str(executable.parent.parent)
    return Interpreter(
        executable=str(executable),
        path=tuple(dict.fromkeys(path)),
        variables={**NOT_INHERITED, PATH: kept, "VIRTUAL_ENV": folder, "PATH": search},
    )


@functools.cache
def _described(executable: str, folders: tuple[str, ...]) -> dict[str, Any]:
    """Ask an interpreter for its ``path``, and its ``software`` with all that is in the folders."""
    try:
        done = subprocess.run(
            [executable, "-I", "-c", PROBE, *folders],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_running(executable, str(error)) from None
    if done.returncode:
        raise _not_running(executable, done.stderr.strip().rpartition("\n")[2])
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    ours = pickling_software()["Python"]
    if (theirs := told["version"]) != ours:
        raise ExecutorNotReady(
            f"On {host_name()} {_named(executable)} is Python {theirs}, and "
            f"{sys.executable}, from where it is started, {ours}. What is pickled by one is not "
            f"understood by the other: make the environment with Python {ours}."
        )
    return told


def _not_running(executable: str, why: str) -> ExecutorNotReady:
    return ExecutorNotReady(
        f"On {host_name()} the environment's interpreter {_named(executable)} does not "
        f"run: {why}. An environment of venv-pack has no interpreter of its own: what it was made "
        "from must lie at the same place on every node (or where venv-pack's -p says), or pack one "
        "with conda-pack. A .zip that was unpacked by Spark has lost its links: take a .tar.gz."
    )


def _named(executable: str) -> str:
    """Name an interpreter, and what it is a link to."""
    target = os.path.realpath(executable)
    return executable if target == executable else f"{executable} (a link to {target})"


@contextlib.contextmanager
def _folders_with(
    names: Sequence[str], variables: Mapping[str, str], deadline: float
) -> Iterator[list[str]]:
    """Use entries of ``sys.path`` with some of this process's modules, and with no others."""
    places = [_place(name) for name in names]
    there = [place for place in places if place.exists()]
    inside = [str(place.parent) for place in places if not place.exists()]  # of an archive

    def make(folder: Path, lock: int) -> None:
        for place in there:
            (folder / place.name).symlink_to(place)

    digest = hashlib.sha256("\0".join(map(str, there)).encode()).hexdigest()[:16]
    folder = cache_folder(variables) / f"modules-{digest}"
    with contextlib.ExitStack() as stack:
        linked = [str(stack.enter_context(build_once(folder, make, deadline)))] if there else []
        yield list(dict.fromkeys([*linked, *inside]))


def _place(name: str) -> Path:
    """Find a module's file, or a package's folder, without an import."""
    found = find_spec(name)
    assert found is not None, "it is a requirement"
    locations = [*(found.submodule_search_locations or []), found.origin]
    return Path(str(locations[0])).absolute()
