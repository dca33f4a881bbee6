"""Changes a module of another package right after a rank imports it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def adapt(name: str, change: Callable[[ModuleType], object]) -> None:
    """Change a module once it is imported, or now if it already is.

    A change that fails does not fail the import, and is reported once: another version of the
    package may have other private names.
    """
    after_import(name, functools.partial(_try, change))


def _try(change: Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        change(module)
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":
            what = getattr(change, "func", change).__name__
            print(
                f"distributor: {module.__name__} could not be adapted ({what}: "
                f"{type(error).__name__}: {error}). This version of it may be newer than those "
                "that this version of distributor knows.",
                file=sys.stderr,
            )


def after_import(name: str, change: Callable[[ModuleType], object]) -> None:
    """Call `change` with a module once it is imported, or now if it already is."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Hook) and finder.name == name:
            finder.changes.append(change)
            return
    sys.meta_path.insert(0, _Hook(name, change))


def at_next_import(package: str, call: Callable[[], object]) -> None:
    """Call a function when a package that this process has imported is imported once more.

    Until then, the package and its modules are as if they had not been imported.
    """
    if package in sys.modules:
        names = [name for name in sys.modules if name.partition(".")[0] == package]
        modules = {name: sys.modules.pop(name) for name in names}
        sys.meta_path.insert(0, _SecondImport(package, modules, call))


class _Hook(MetaPathFinder, Loader):
    """Finds one module as usual, and makes changes after the module's own loader has run."""

    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self.name = name
        self.changes = [change]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # which also finds the module's data files
        if module.__spec__:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Only now: a program may look for the spec alone, and try an import that failed again.
        sys.meta_path.remove(self)
        for change in self.changes:
            change(module)


class _SecondImport(MetaPathFinder, Loader):
    """Finds a package that has been imported, and whose modules it keeps."""

    def __init__(
        self, package: str, modules: dict[str, ModuleType], call: Callable[[], object]
    ) -> None:
        self._package, self._modules, self._call = package, modules, call
        self._spec = modules[package].__spec__

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package or self._spec is None:
            return None
        spec = ModuleSpec(fullname, self, origin=self._spec.origin)
        spec.submodule_search_locations = self._spec.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._modules[self._package]

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self._spec
        sys.modules.update(self._modules)
        self._call()
