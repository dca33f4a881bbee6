"""Which modules a program imports, and what its functions refer to, found without running it."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import os
import threading
import types
from collections.abc import Iterator
from typing import Any

_parsing = threading.Lock()
"""Python 3.11 counts the depth of all threads' syntax trees as one: SystemError if it differs."""


def _renew_lock() -> None:
    global _parsing
    _parsing = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have it


def imports_in_source(source: str | bytes) -> frozenset[str]:
    """Return what a file imports anywhere by full names; nothing if it is invalid Python."""
    try:
        with _parsing:
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def imports_in_code(code: types.CodeType) -> Iterator[str]:
    """Yield what a function and functions inside it import, by full names."""
    for part in nested_code(code):
        module = ""
        for instruction in dis.get_instructions(part):
            if instruction.opname == "IMPORT_NAME":
                if module := str(instruction.argval):
                    yield module
            elif instruction.opname == "IMPORT_FROM" and module:
                yield f"{module}.{instruction.argval}"


def without_partials(function: Any) -> Any:
    """Return the function that partial functions of it call."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def imports_of(function: Any) -> Iterator[str]:
    """Yield what the code of a function imports; nothing of other objects."""
    code = getattr(without_partials(function), "__code__", None)
    if isinstance(code, types.CodeType):
        yield from imports_in_code(code)


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


COLLECTIONS = (dict, list, tuple, set, frozenset)


def plain_items(collection: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of one of `COLLECTIONS`, as it stores them, with their keys.

    Other collections may compute their items, as may a subclass that is asked for them.
    """
    kind: Any = next(kind for kind in COLLECTIONS if isinstance(collection, kind))
    return iter(kind.items(collection) if kind is dict else enumerate(kind.__iter__(collection)))


def captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that a function refers to: variables, globals and defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is not set yet
            yield name, cell.cell_contents
    for code in nested_code(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]
    yield from (function.__kwdefaults__ or {}).items()
    defaults = function.__defaults__ or ()
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
