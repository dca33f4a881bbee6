"""The source of this package: its files, their digest, and how executors import the driver's.

A driver and its nodes exchange messages and pickled objects of this package, so they must run the
same source. Two copies can have the same version number, so a digest of the source identifies them.

The driver sends the text of this module with each Spark task, which executes it before it imports
the package. So this module imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, NamedTuple
from zipfile import ZipFile

PACKAGE = "distributor"
ARCHIVE = "distributor-source-"
"""Prefix of the names of the archives that carry a driver's source to executors."""

State = tuple[tuple[str, int, int], ...]
"""Paths, sizes (bytes) and modification times (ns) of source files."""


class Checked(NamedTuple):
    """The copy of this package that the process of a Spark task has imported.

    Parameters
    ----------
    digest : str
        The digest of its source.
    state : tuple
        The state of its files at that time.
    replaced : str
        The installed copy that is not used because it differs; empty if there is none.
    """

    digest: str
    state: State
    replaced: str


checked: Checked | None = None
"""Set in the process of a Spark task, before it imports any other module of the package."""


@functools.cache
def own_digest() -> str:
    """Return the digest of this copy's source at the time of this process's first call."""
    return checked.digest if checked else digest_of(files_of(own_spec()))


def own_spec() -> ModuleSpec | None:
    """Return the location from which this process has imported the package."""
    return sys.modules[PACKAGE].__spec__


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the digest of a package's source, as `files_of` returns it."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()[:16]


def files_of(spec: ModuleSpec | None) -> dict[str, bytes]:
    """Read the source files of a package, by their path in it.

    Parameters
    ----------
    spec : ModuleSpec or None
        The package, in a folder or in a zip archive. A module or None has no files.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    root = _root(spec)
    if archive := _archive_of(spec):
        inside = os.path.relpath(root, archive).replace(os.sep, "/") + "/"
        with ZipFile(archive) as packed:
            names = [name for name in packed.namelist() if name.startswith(inside)]
            return {name[len(inside) :]: packed.read(name) for name in names if _is_source(name)}
    files = {}
    for entry in _entries(root):
        with open(entry.path, "rb") as file:
            files[os.path.relpath(entry.path, root).replace(os.sep, "/")] = file.read()
    return files


def state_of(spec: ModuleSpec | None) -> State:
    """Return the state of a package's source files, which is cheaper than reading them.

    Raises
    ------
    OSError
        If the state of a file cannot be read.
    """
    if archive := _archive_of(spec):
        status = os.stat(archive)
        return ((archive, status.st_size, status.st_mtime_ns),)
    found = ((entry.path, entry.stat()) for entry in _entries(_root(spec)))
    return tuple(sorted((path, status.st_size, status.st_mtime_ns) for path, status in found))


def import_drivers_source(digest: str, archive: Callable[[], str]) -> str:
    """Make this process import the package with the driver's source, installed here or sent.

    Parameters
    ----------
    digest : str
        The digest of the driver's source.
    archive : callable
        Returns the path of the archive with that source.

    Returns
    -------
    str
        The installed copy that is not used because it differs; empty if there is none.
    """
    # Spark reuses its Python workers: an earlier task may have done this already.
    before = getattr(sys.modules.get(f"{PACKAGE}.source"), "checked", None)
    if before and (before.digest, before.state) == (digest, _state_or_none(own_spec())):
        return str(before.replaced)

    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    # Through Connect, one process may serve drivers with different sources.
    sys.path[:] = [path for path in sys.path if not os.path.basename(path).startswith(ARCHIVE)]
    spec, replaced = _installed_spec(), ""
    state, files = _state_or_none(spec), {}
    with contextlib.suppress(OSError):  # it may be unreadable, or be replaced at this moment
        files = files_of(spec)
    if digest_of(files) != digest:
        replaced = _described(spec, files)
        sys.path.insert(0, archive())
        state = _state_or_none(_installed_spec())
    module: Any = import_module(f"{PACKAGE}.source")
    module.checked = Checked(digest, state or (), replaced)
    return replaced


def _installed_spec() -> ModuleSpec | None:
    with contextlib.suppress(ImportError):  # a finder may raise instead of returning None
        return find_spec(PACKAGE)
    return None


def _root(spec: ModuleSpec | None) -> str:
    return next(iter(spec.submodule_search_locations or ()), "") if spec else ""


def _archive_of(spec: ModuleSpec | None) -> str:
    return str(getattr(spec.loader, "archive", "")) if spec else ""


def _is_source(name: str) -> bool:
    return name.endswith(".py")


def _entries(root: str) -> Iterator[os.DirEntry[str]]:
    """List the source files below a folder."""
    folders = [root] if root else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if _is_source(entry.name):
                    yield entry
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)


def _state_or_none(spec: ModuleSpec | None) -> State | None:
    try:
        return state_of(spec)
    except OSError:
        return None


def _described(spec: ModuleSpec | None, files: Mapping[str, bytes]) -> str:
    if spec is None:
        return ""
    version = re.search(rb'__version__ = "(.*)"', files.get("version.py", b""))
    where = _root(spec) or spec.origin
    return f"{version[1].decode() if version else '(unknown version)'} in {where}"
