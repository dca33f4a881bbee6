"""Changes a module of another package right after a rank imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from distributor.core.module_search import find_in_package


def after_import(name: str, change: Callable[[ModuleType], object]) -> None:
    """Call `change` with a module once it is imported, or now if it already is.

    Parameters
    ----------
    name : str
        The module's full name. It is not imported here: a program may not need it.
    change : callable
        Called once, with the module.
    """
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Hook(name, change))


class _Hook(MetaPathFinder, Loader):
    """Finds one module as usual, and calls `change` after the module's own loader has run."""

    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_in_package(fullname, path, target)
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
        self._change(module)
