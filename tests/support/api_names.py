"""The public names of a module, and what a caller can rely on for each.

A surface maps a key to a description. The keys are those of a name, ``Class``, of a member,
``Class.member``, of a parameter, ``function(parameter)``, and of the order of the positional
parameters, ``function()``. Two modules offer the same if their surfaces are equal.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Surface = dict[str, str]
NOT_READ = "not read"
"""The description of a name of a module that cannot be imported here."""

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "by position",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "by position or name",
    inspect.Parameter.KEYWORD_ONLY: "by name",
}


def read_surface(modules: Sequence[str], root: str, inherited: Collection[str] = ()) -> Surface:
    """Return the surface of modules, without those that do not exist.

    Parameters
    ----------
    modules : sequence of str
        Their full names.
    root : str
        The package whose classes count: members that another package defines are left out.
    inherited : collection of str
        Keys of members that count even so.
    """
    surface: Surface = {}
    things: dict[str, Any] = {}
    for module in modules:
        try:
            loaded = import_module(module)
        except ModuleNotFoundError:
            surface |= dict.fromkeys(_names_in_source(module), NOT_READ)
        except NotImplementedError:  # a module that refuses each of its names
            continue
        else:
            things |= {name: getattr(loaded, name) for name in public_names(loaded)}
    for name, thing in things.items():
        if not isinstance(thing, type):
            surface |= _described(name, thing)
            continue
        bases = [other for other, base in things.items() if base in thing.__mro__[1:]]
        surface[name] = f"class({', '.join(bases)})"
        surface |= _constructor(name, thing, root) | _members(name, thing, root, inherited)
    return surface


def bases_in(description: str) -> list[str]:
    """Return the public base classes in the description of a class."""
    return re.findall(r"\w+", description.removeprefix("class"))


def public_names(module: Any) -> list[str]:
    """Return the names that a module exports, or defines if it does not say which it exports."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    )


def _names_in_source(module: str) -> list[str]:
    """Return what a module that needs a missing package exports."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # nor is there a package that it could be in
        return []
    if spec is None or spec.origin is None:
        return []
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def _described(name: str, thing: Any) -> Surface:
    """Return the entries of a function, a module or a constant."""
    if inspect.ismodule(thing):
        return {name: "module"}
    if not callable(thing):
        return {name: f"constant {thing!r}"}
    return {name: "function"} | _parameters(name, thing)


def _constructor(name: str, cls: type, root: str) -> Surface:
    defines_it = next(base for base in cls.__mro__ if "__init__" in vars(base))
    is_ours = defines_it.__module__.split(".")[0] == root
    return _parameters(name, cls) if is_ours and not issubclass(cls, enum.Enum) else {}


def _parameters(name: str, function: Any) -> Surface:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in class
        return {}
    named = [each for each in signature.parameters.values() if each.kind in _KINDS]
    named = [each for each in named if each.name != "self" and not each.name.startswith("_")]
    if not named:  # also if it passes on whatever it gets
        return {}
    surface = {
        f"{name}({each.name})": f"{_KINDS[each.kind]}{_default(each.default)}" for each in named
    }
    by_position = [each.name for each in named if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    return surface | {f"{name}()": ", ".join(by_position)}


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ", required"
    if isinstance(value, enum.Enum):
        return f", default {value}"
    if callable(value):
        return f", default {getattr(value, '__qualname__', type(value).__name__)}"
    return f", default {value!r}"


def _members(name: str, cls: type, root: str, inherited: Collection[str]) -> Surface:
    surface: Surface = {}
    if issubclass(cls, enum.Enum):
        surface |= {f"{name}.{each.name}": f"member {each.value!r}" for each in cls}
    for member in sorted(_member_names(cls, root) | _members_in(inherited, name, cls)):
        key = f"{name}.{member}"
        static = inspect.getattr_static(cls, member, None)
        if key in surface:
            continue
        if isinstance(static, (classmethod, staticmethod)):
            surface |= {key: type(static).__name__} | _parameters(key, getattr(cls, member))
        elif inspect.isfunction(static):
            surface |= {key: "method"} | _parameters(key, static)
        elif member.isupper():
            surface[key] = f"constant {static!r}"
        else:
            surface[key] = "attribute"
    return surface


def _member_names(cls: type, root: str) -> set[str]:
    found: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == root:
            found |= {*vars(base), *vars(base).get("__annotations__", {}), *_assigned_in(base)}
    if dataclasses.is_dataclass(cls):
        found |= {field.name for field in dataclasses.fields(cls)}
    return {name for name in found if not name.startswith("_")}


def _assigned_in(cls: type) -> set[str]:
    """Return the attributes that the source of the constructor of a class assigns."""
    constructor = vars(cls).get("__init__")
    with contextlib.suppress(OSError, TypeError):  # the constructor of a dataclass has no source
        tree = ast.parse(textwrap.dedent(inspect.getsource(constructor)))  # type: ignore[arg-type]
        return {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        }
    return set()


def _members_in(keys: Collection[str], name: str, cls: type) -> set[str]:
    """Return the members that are asked for and that a class has, wherever it has them from."""
    asked = {key.partition(".")[2] for key in keys if key.startswith(f"{name}.") and "(" not in key}
    return {member for member in asked if hasattr(cls, member)}
