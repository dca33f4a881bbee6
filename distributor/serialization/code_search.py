"""Which modules a program imports, and whether it mentions a package, found without running it."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributor.core.module_search import is_installed


def imports_in_source(source: str | bytes) -> frozenset[str]:
    """Return what a file imports anywhere by full names; nothing if it is invalid Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(_imported_names(tree))


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


def imports_of(function: Any) -> Iterator[str]:
    """Yield what the code of a function imports; nothing of other objects."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        yield from imports_in_code(code)


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# How many functions and values are searched, and elements of a container that is searched.
MAX_PARTS = 10_000
PACKAGE = Path(__file__).resolve().parent.parent


def script_mentions(package: str, path: Path) -> bool:
    """Return whether a script, or a module beside it that it imports, mentions a package."""
    return any(_mentions(package, code) for code in _code_of_script(path))


def call_mentions(package: str, *parts: object) -> bool:
    """Return whether a function, or one of the user's that it refers to, mentions a package."""
    return any(_mentions(package, code) for code in _code_of_call(*parts))


def _mentions(package: str, code: types.CodeType) -> bool:
    # A string that is the name itself is an argument, such as report_to="mlflow".
    return package in code.co_consts or any(package in name.lower() for name in _names(code))


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code, and the functions inside it, use."""
    for part in nested_code(code):
        yield from part.co_names
        yield from part.co_freevars


def _code_of_script(script: Path) -> Iterator[types.CodeType]:
    ahead, seen, folder = [script], set[Path](), script.resolve().parent
    while ahead:
        path = ahead.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        try:
            code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError):
            continue  # the ranks will raise the error
        yield code
        for name in _names(code):
            module = folder.joinpath(*name.split("."))
            ahead += [module.with_suffix(".py"), module / "__init__.py"]


def _code_of_call(*parts: object) -> Iterator[types.CodeType]:
    ahead: list[Any] = list(parts)
    seen: dict[int, object] = {}  # the objects too, so that no id is used again
    while ahead and len(seen) < MAX_PARTS:
        part = ahead.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, types.FunctionType) and _is_user_file(part.__code__.co_filename):
            yield part.__code__
        ahead += _parts(part)


def _parts(part: Any) -> list[Any]:
    """Return the parts of a function or value in which there may be functions."""
    if isinstance(part, types.FunctionType):
        return list(_values_of(part)) if _is_user_file(part.__code__.co_filename) else []
    if isinstance(part, types.ModuleType):
        return []
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, COLLECTIONS):
        return [value for _, value in plain_items(part)] if len(part) < MAX_PARTS else []
    if isinstance(part, type):
        return list(vars(part).values()) if _is_user_file(_file_of(part)) else []
    if isinstance(part, _DESCRIPTORS):
        inner = (getattr(part, name, None) for name in ("__func__", "__self__", "fget"))
        return [each for each in inner if each is not None]
    file = _file_of(type(part))
    if _is_user_file(file) or file.startswith(str(PACKAGE)):
        return [type(part), *getattr(part, "__dict__", {}).values()]
    return []


COLLECTIONS = (dict, list, tuple, set, frozenset)
_DESCRIPTORS = (
    types.MethodType,
    types.BuiltinMethodType,
    classmethod,
    staticmethod,
    property,
)


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


def _values_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values that a function refers to, also as attributes of the user's modules."""
    names = set(_names(function.__code__))
    for _, value in captured(function):
        yield value
        is_module = isinstance(value, types.ModuleType)
        if is_module and _is_user_file(getattr(value, "__file__", None) or ""):
            yield from (vars(value)[name] for name in names & vars(value).keys())


def _file_of(kind: type) -> str:
    """Return the file of a class; empty if it is built in."""
    if kind.__module__ == "__main__":
        return "<main>"  # in a notebook, it has no file
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _is_user_file(file: str) -> bool:
    """Return whether a file belongs to no installation, such as a notebook's cell."""
    if not file or file.startswith(("<frozen", str(PACKAGE))):
        return False
    return not is_installed(file)
