"""What this package uses of cloudpickle that is not documented."""

from __future__ import annotations

from typing import Any

import cloudpickle


def use_as_globals(pickler: cloudpickle.Pickler, namespace: dict[str, Any], stand_in: Any) -> None:
    """Have the functions that are pickled by value with one namespace get another one."""
    pickler.globals_ref[id(namespace)] = stand_in


def with_functions(reduced: Any, make: Any, set_attributes: Any, argument: Any) -> Any:
    """Return how a class is pickled by value, with other functions that make it."""
    if len(reduced) < 6:  # a type of Python's own, such as that of None
        return reduced
    own_make, args, state, items, pairs, own_setter = reduced
    return make, (own_make, *args), (own_setter, state, argument), items, pairs, set_attributes


def with_globals(reduced: Any, further: dict[str, Any]) -> Any:
    """Return how a function is pickled by value, with further globals."""
    make, args, (state, slots), *rest = reduced
    return make, args, (state, {**slots, "__globals__": further | slots["__globals__"]}), *rest


def known_class(arguments: tuple[Any, ...]) -> type | None:
    """Return the class that this process has already, by the arguments of a function to make it."""
    known: type | None = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    return known
