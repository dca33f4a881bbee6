"""Whether a program mentions a package, found without running it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distributor.core.module_search import is_installed
from distributor.serialization.code_imports import nested_code

MAX_PARTS = 10_000
"""How many functions and values are searched, and elements of a container that is searched."""
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
        return _captured(part) if _is_user_file(part.__code__.co_filename) else []
    if isinstance(part, types.ModuleType):
        return []
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, Mapping):
        return list(part.values()) if len(part) < MAX_PARTS else []
    if isinstance(part, (list, tuple)):
        return list(part) if len(part) < MAX_PARTS else []
    if isinstance(part, type):
        return list(vars(part).values()) if _is_user_file(_file_of(part)) else []
    file = _file_of(type(part))
    if _is_user_file(file) or file.startswith(str(PACKAGE)):
        return [type(part), *getattr(part, "__dict__", {}).values()]
    inner = (getattr(part, name, None) for name in ("__func__", "__self__", "fget"))
    return [each for each in inner if each is not None]


def _captured(function: types.FunctionType) -> list[Any]:
    """Return the values that a function refers to, also as attributes of the user's modules."""
    found: list[Any] = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable that is not set yet
            continue
    names = set(_names(function.__code__))
    values = [function.__globals__[name] for name in names & function.__globals__.keys()]
    for value in values:
        if isinstance(value, types.ModuleType) and _is_user_file(
            getattr(value, "__file__", None) or ""
        ):
            found += [vars(value)[name] for name in names & vars(value).keys()]
    return found + values


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
