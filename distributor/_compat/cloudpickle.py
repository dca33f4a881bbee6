"""What this package uses of cloudpickle that is not documented."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

import cloudpickle


def use_as_globals(pickler: cloudpickle.Pickler, namespace: dict[str, Any], stand_in: Any) -> None:
    """Have the functions that are pickled by value with one namespace get another one."""
    pickler.globals_ref[id(namespace)] = stand_in


def with_functions(reduced: Any, make: Any, set_attributes: Any, argument: Any) -> Any:
    """Return how a class is pickled by value, with other functions that make it."""
    if len(reduced) < 6:  # a type of Python's own, such as that of None
        return reduced
    own_make, args, (attributes, other), items, pairs, own_setter = reduced
    # cloudpickle would set slots too late. NamedTuple has its own, and an enumeration none.
    if "__slots__" in attributes and len(args) == 6 and typing.NamedTuple not in args[2]:
        args = (*args[:3], {**args[3], "__slots__": attributes["__slots__"]}, *args[4:])
        kinds = types.MemberDescriptorType, types.GetSetDescriptorType
        attributes = {k: v for k, v in attributes.items() if not isinstance(v, kinds)}
    state = own_setter, (attributes, other), argument
    return make, (own_make, *args), state, items, pairs, set_attributes


def with_globals(reduced: Any, further: dict[str, Any]) -> Any:
    """Return how a function is pickled by value, with further globals."""
    make, args, (state, slots), *rest = reduced
    return make, args, (state, {**slots, "__globals__": further | slots["__globals__"]}), *rest


def with_version(reduced: Any, version: Callable[[], str]) -> Any:
    """Return how a class is pickled by value, with a version of what identifies it elsewhere.

    A class that was loaded has one already.
    """
    if len(reduced) < 6 or "." in reduced[1][-2]:
        return reduced
    make, (*args, key, extra), *rest = reduced
    return make, (*args, f"{key}.{version()}", extra), *rest


def known_class(arguments: tuple[Any, ...]) -> type | None:
    """Return the class that this process has already, by the arguments of a function to make it.

    It is the class that was pickled, whichever version, or one that was loaded in this version.
    """
    known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    own: type | None = known.get(arguments[-2].partition(".")[0])
    return own or known.get(arguments[-2])
