"""Where a module is: in the file that this process imported, or the one that an import finds."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

# The names of a main module, the second in processes that ``multiprocessing`` has started.
MAIN_MODULES = ("__main__", "__mp_main__")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # of installations


@dataclass(frozen=True)
class Location:
    """The place of a module."""

    name: str
    file: str | None  # None for a namespace package
    folders: tuple[str, ...] | None  # of a package; None for a module
    archive: str = ""  # the zip file that contains all of this, if one does

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders of a package, or the file of a module."""
        if self.folders is not None:
            return self.folders
        return () if self.file is None else (self.file,)


def locate(name: str, first: Sequence[str] = ()) -> Location | None:
    """Return where a module is, without importing it; None if it is neither a file nor a folder."""
    if first:
        # With the rest of the path, because a package there replaces a folder without __init__.py.
        found = _location_of_spec(name, PathFinder.find_spec(name, [*first, *search_path()]))
        if found and any(os.path.dirname(path) in first for path in found.paths):
            return found
    return _location_of_module(name) or _location_of_spec(name, find_spec(name))


def find_spec(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """Find a module as an import would, without importing the packages above it."""
    parts, spec = name.split("."), None
    for end in range(1, len(parts) + 1):
        spec = _find_in_package(".".join(parts[:end]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def is_runnable(name: str) -> bool:
    """Return whether ``python -m`` finds a module, and the module has a main part."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return find_spec(f"{name}.__main__") is not None
    if spec is None or not spec.has_location or not spec.origin:
        return False
    return b"if __name__ ==" in Path(spec.origin).read_bytes()


def _find_in_package(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Ask all finders for a module, as ``MetaPathFinder.find_spec``."""
    is_top = "." not in name
    for finder in list(sys.meta_path):
        if not hasattr(finder, "find_spec"):
            continue  # finders without it are possible before Python 3.12
        if is_top and finder is PathFinder:
            # Not sys.path itself: Python would then keep finders of its relative entries.
            spec = PathFinder.find_spec(name, search_path() if path is None else path)
        elif is_top:
            spec = finder.find_spec(name, None)
        else:
            try:
                spec = finder.find_spec(name, path)
            except (KeyError, ModuleNotFoundError):
                # A namespace package looks for the package above it in sys.modules.
                spec = finder.find_spec(name.rpartition(".")[2], path)
        if spec is not None:
            return spec
    return None


def search_path() -> list[str]:
    """Return the entries of ``sys.path`` as absolute paths."""
    # Some entries are no paths, but names that a finder of an editable installation recognizes.
    return [
        os.path.abspath(entry) if not entry or os.path.exists(entry) else entry
        for entry in lasting_path()
    ]


def lasting_path() -> list[str]:
    """Return ``sys.path``, in which the folder that it was before follows a relative entry."""
    # Python keeps the finder of such an entry: it still finds modules there after a chdir.
    path = []
    for entry in sys.path:
        path.append(entry)
        finder = sys.path_importer_cache.get(entry)
        if isinstance(finder, FileFinder) and os.path.abspath(finder.path) != os.path.abspath(
            entry
        ):
            path.append(finder.path)
    return path


def forget_listings() -> None:
    """Drop cached listings of folders, in which a file that was just created may be missing."""
    # importlib.invalidate_caches would also read the archives on the path again.
    for finder in list(sys.path_importer_cache.values()):
        if isinstance(finder, FileFinder):
            finder.invalidate_caches()


def imported() -> Iterator[Location]:
    """Yield the modules of the user's that this process has imported and that others need by name.

    These are top-level modules, modules that are not in the folder of their package, and packages
    above those that have no place themselves.
    """
    users = {__name__.partition(".")[0]: False}  # also if this package runs from a checkout
    for name, module in list(sys.modules.items()):
        if "." in name or name in MAIN_MODULES or name in users:
            continue
        if _is_from_installation(module):
            users[name] = False
        elif found := _location_of_module(name):
            users[name] = not all(map(is_installed, found.paths))
            if users[name] and not _is_alias(name, module):
                yield found
    for name, module in list(sys.modules.items()):
        package, _, tail = name.rpartition(".")
        top = name.partition(".")[0]
        if not package or not users.get(top, True) or _is_from_installation(module):
            continue
        found = None if _is_alias(name, module) else _location_of_module(name)
        if found is None or _is_inside(package, tail, found):
            continue
        yield found
        while package and not locate(package):
            yield Location(package, None, ())  # only entered in sys.modules
            package = package.rpartition(".")[0]


def not_on_path(names: Iterable[str]) -> Iterator[Location]:
    """Yield the modules, and the packages above them, that are not where ``sys.path`` leads."""
    for name in names:
        parts, path = name.split("."), search_path()
        for end in range(1, len(parts) + 1):
            found = locate(".".join(parts[:end]))
            if found is None or found.archive:
                break
            # By its last part, because a namespace package looks for the one above it.
            spec = PathFinder.find_spec(parts[end - 1], path)
            if found != _location_of_spec(found.name, spec):
                yield found
            path = list(found.folders or ())


def _is_from_installation(module: object) -> bool:
    """Return whether a module's code is part of an installation, which most modules' is."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return isinstance(file, str) and is_installed(file)


def is_installed(path: str) -> bool:
    """Return whether a path belongs to Python, an installed package or Spark."""
    return _is_installed(path, os.environ.get("SPARK_HOME") or "")


@functools.lru_cache(maxsize=65536)
def _is_installed(path: str, spark_home: str) -> bool:
    if not set(PACKAGE_FOLDERS).isdisjoint(path.split(os.sep)):
        return True
    bases = (*_installations(), os.path.abspath(spark_home)) if spark_home else _installations()
    return any(path == base or path.startswith(base + os.sep) for base in bases)


@functools.cache
def _installations() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(kind) for kind in kinds]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(dict.fromkeys(map(os.path.abspath, folders)))


def find_at(locations: Sequence[Location]) -> None:
    """Make imports find modules at these places, wherever ``sys.path`` leads."""
    if locations:
        sys.meta_path.insert(0, _LocationFinder({each.name: each for each in locations}))


@dataclass(frozen=True)
class _LocationFinder(MetaPathFinder):
    locations: Mapping[str, Location]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (location := self.locations.get(fullname)) is None:
            return None
        folders = None if location.folders is None else list(location.folders)
        if location.file is not None:
            return spec_from_file_location(
                fullname, location.file, submodule_search_locations=folders
            )
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec


def _location_of_module(name: str) -> Location | None:
    """Return the place of a module that this process has imported."""
    # Not by getattr: some modules make up any attribute, and importing them may take seconds.
    attributes: Mapping[str, Any] = getattr(sys.modules.get(name), "__dict__", {})
    spec = attributes.get("__spec__")
    file = attributes.get("__file__") or (spec.origin if spec and spec.has_location else None)
    return _location(name, file, attributes.get("__path__"), getattr(spec, "loader", None))


def _location_of_spec(name: str, spec: ModuleSpec | None) -> Location | None:
    if spec is None:
        return None
    file = spec.origin if spec.has_location else None
    return _location(name, file, spec.submodule_search_locations, spec.loader)


def _location(
    name: str, file: str | None, folders: Iterable[object] | None, loader: object
) -> Location | None:
    archive = getattr(loader, "archive", None)
    archive = os.path.abspath(archive) if archive and os.path.isfile(archive) else ""
    if file is not None:
        file = os.path.abspath(file)
        if not archive and not os.path.isfile(file):
            return None
    if folders is not None:
        # Finders of editable installations add entries that are not folders.
        absolute = [os.path.abspath(each) for each in folders if isinstance(each, str)]
        folders = tuple(each for each in absolute if archive or os.path.isdir(each))
    return Location(name, file, folders, archive) if file or folders else None


def _is_alias(name: str, module: object) -> bool:
    """Return whether a module is entered under a name that is not its own."""
    spec = getattr(module, "__dict__", {}).get("__spec__")
    return (spec.name if spec else getattr(module, "__dict__", {}).get("__name__")) != name


def _is_inside(package: str, tail: str, location: Location) -> bool:
    """Return whether an import finds a module in the folders of its package."""
    above = _location_of_module(package)
    return above is not None and any(
        os.path.dirname(path) in above.paths and os.path.basename(path).partition(".")[0] == tail
        for path in location.paths
    )
