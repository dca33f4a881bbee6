"""Pickles of functions, classes and what belongs to them, by value if they cannot be imported.

This is cloudpickle, with these differences:

- Code keeps the name of its file. cloudpickle 3.1.3 and newer replace it, so that a pickle does not
  depend on where a function was defined; tracebacks then show neither the file nor the line.
- A class that the loading process has already, as the driver has those of its own main module,
  stays as it is there. cloudpickle finds it too, but replaces its attributes by copies.
- A class that changes, or whose globals change, is another class where it is loaded. cloudpickle
  identifies it by the object alone, so that a process that is used again would keep the first one.
- A class inside another one keeps its qualified name, by which it is pickled.
- The bodies of classes inside a function find the globals that they name, as its code does.
- What the functools module makes of functions is pickled by value where the function is.
- So are objects that pickle themselves by name, if the loading process cannot import that name.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import inspect
import io
import pickle
import sys
import types
import typing
import uuid
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import cloudpickle

from distributor._compat.cloudpickle import (
    known_class,
    with_functions,
    with_globals,
    with_version,
)
from distributor.core.module_search import MAIN_MODULES
from distributor.serialization.code_search import nested_code

_NAME_LOOKUPS = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that pickles by value what cannot be imported elsewhere."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.CodeType:
            return _code_of_file, (obj.co_filename, *self.dispatch_table[kind](obj))
        if kind in _REDUCERS:
            return NotImplemented if _is_importable(obj) else _REDUCERS[kind](obj)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return _reduce_main_global(obj) if kind.__module__ in MAIN_MODULES else reduced
        if issubclass(kind, type):
            reduced = with_functions(reduced, _make_class, _set_attributes, obj.__qualname__)
            return with_version(reduced, lambda: self._version(obj))
        if obj.__code__ is _DISPATCHER:
            return _reduce_single_dispatch(obj)
        names = set(_names_in_class_bodies(obj.__code__)) & obj.__globals__.keys()
        return with_globals(reduced, {name: obj.__globals__[name] for name in sorted(names)})

    def _version(self, kind: type) -> str:
        """Return a digest of a class and of all that its functions use."""
        digest = _Digest()
        try:
            _VersionPickler(digest, buffer_callback=digest.add).dump(kind)
        except Exception:  # what cannot be compared is always new
            return uuid.uuid4().hex
        return digest.hash.hexdigest()


class _VersionPickler(Pickler):
    """A pickler for a digest of a class, in which other classes need no version."""

    def _version(self, kind: type) -> str:
        return ""


class _Digest(io.BytesIO):
    """A file that keeps only a digest of what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return memoryview(data).nbytes

    def add(self, buffer: pickle.PickleBuffer) -> None:
        self.hash.update(buffer.raw())


def dumps(obj: object) -> bytes:
    """Pickle an object, by value if it cannot be imported elsewhere."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(obj)
    return buffer.getvalue()


def attribute(namespace: Any, path: str) -> Any:
    """Return what a dotted path names in a module or class; None if there is no such thing."""
    try:
        return attrgetter(path)(namespace)
    except AttributeError:
        return None


def _names_in_class_bodies(code: types.CodeType) -> Iterator[str]:
    """Yield the names that class bodies inside a function look up in the class, then globally."""
    for part in nested_code(code):
        if not part.co_flags & inspect.CO_OPTIMIZED:
            found = dis.get_instructions(part)
            yield from (each.argval for each in found if each.opname in _NAME_LOOKUPS)


def _code_of_file(
    filename: str, make: Callable[..., types.CodeType], arguments: tuple[Any, ...]
) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


def _make_class(make: Callable[..., type], *args: Any) -> type:
    made = known_class(args)
    if made is None:
        made = make(*args)
        _incomplete_classes.add(made)
    return made


def _set_attributes(made: type, values: tuple[Callable[..., object], Any, str]) -> None:
    if made in _incomplete_classes:
        setter, state, name = values
        setter(made, state)
        made.__qualname__ = name  # which cloudpickle leaves out
        _incomplete_classes.discard(made)


def _is_importable(obj: Any) -> bool:
    """Return whether other processes find an object by its module's name and its own."""
    module = getattr(obj, "__module__", None)
    if module in MAIN_MODULES or module in cloudpickle.list_registry_pickle_by_value():
        return False
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", "")
    return attribute(sys.modules.get(module or ""), str(name)) is obj


def _reduce_main_global(obj: Any) -> Any:
    """Reduce a global of the main module whose class has it pickled by its name."""
    kind: Any = type(obj)
    if kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__:
        return NotImplemented
    reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, str):
        return reduced
    return _own_global, (kind.__module__, reduced, kind, getattr(obj, "__dict__", {}))


def _own_global(module: str, name: str, kind: Any, state: dict[str, Any]) -> Any:
    found = attribute(sys.modules.get(module), name)
    if type(found) is kind:
        return found
    made = kind.__new__(kind)
    for attribute_name, value in state.items():
        object.__setattr__(made, attribute_name, value)
    return made


def _reduce_cache(cache: Any) -> Any:
    state = {k: v for k, v in vars(cache).items() if k not in ("__wrapped__", "cache_parameters")}
    return _cached, (cache.__wrapped__, cache.cache_parameters()), state


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(cached: Any) -> Any:
    # It has a lock before Python 3.12.
    state = {name: value for name, value in vars(cached).items() if name != "lock"}
    return functools.cached_property, (cached.func,), state


def _reduce_single_dispatch(function: Any) -> Any:
    state = {k: v for k, v in vars(function).items() if k not in _OF_SINGLE_DISPATCH}
    registered = dict(function.registry)
    return (
        functools.singledispatch,
        (registered.pop(object),),
        (registered, state),
        None,
        None,
        _set_single_dispatch,
    )


def _set_single_dispatch(function: Any, state: tuple[dict[type, Any], dict[str, Any]]) -> None:
    registered, attributes = state
    for kind, implementation in registered.items():
        function.register(kind, implementation)
    vars(function).update(attributes)


def _by_value(kind: Any, *names: str) -> Callable[[Any], Any]:
    """Return a reducer to a call of `kind` with these attributes."""
    return lambda obj: (kind, tuple(getattr(obj, name) for name in names))


def _reduce_alias_type(alias: Any) -> Any:
    kind: Any = type(alias)
    make = functools.partial(kind, type_params=alias.__type_params__)
    return make, (alias.__name__, alias.__value__)


# Classes that were made without their attributes, which follow them in a pickle.
_incomplete_classes: weakref.WeakSet[type] = weakref.WeakSet()

_dispatching: Any = functools.singledispatch(lambda _: None)
_DISPATCHER = _dispatching.__code__  # which all such functions share
_OF_SINGLE_DISPATCH = ("register", "dispatch", "registry", "_clear_cache", "__wrapped__")
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(lambda: None)): _reduce_cache,
    functools.cached_property: _reduce_cached_property,
    # Fields of a data class are compared with this object by identity.
    type(dataclasses.MISSING): lambda _: (getattr, (dataclasses, "MISSING")),
    typing.NewType: _by_value(typing.NewType, "__name__", "__supertype__"),
    typing.ParamSpec: _by_value(typing.ParamSpec, "__name__"),
}
if sys.version_info >= (3, 11):
    _REDUCERS[typing.TypeVarTuple] = _by_value(typing.TypeVarTuple, "__name__")
if sys.version_info >= (3, 12):
    _REDUCERS[typing.TypeAliasType] = _reduce_alias_type
