"""Checks code against this package without running it."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any


class UsesOfPackage(ast.NodeVisitor):
    """Looks up the names that visited code imports from this package, and checks their calls.

    A name that the package does not have raises `AttributeError` or `ImportError`, and arguments
    that a function does not take raise `TypeError`.

    Attributes
    ----------
    calls : int
        The number of calls that were checked.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._names: dict[str, Any] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_ours(alias.name):
                found = importlib.import_module(alias.name)
                top = importlib.import_module(alias.name.partition(".")[0])
                self._names[alias.asname or top.__name__] = found if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if _is_ours(node.module or ""):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                self._names[alias.asname or alias.name] = getattr(module, alias.name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._found(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = self._found(node.func)
        if callable(function):
            self.calls += 1
            named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            positional = [
                argument for argument in node.args if not isinstance(argument, ast.Starred)
            ]
            inspect.signature(function).bind_partial(*positional, **named)
        self.generic_visit(node)

    def _found(self, node: ast.expr) -> Any:
        """Return what ``distributor.train.report``, for example, names; None if it is not ours."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute) and inspect.ismodule(owner := self._found(node.value)):
            return getattr(owner, node.attr)
        return None


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "distributor"
