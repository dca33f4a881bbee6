"""What this package uses of cloudpickle that is not documented."""

from __future__ import annotations

from typing import Any

import cloudpickle


def use_as_globals(pickler: cloudpickle.Pickler, namespace: dict[str, Any], stand_in: Any) -> None:
    """Have the functions that are pickled by value with one namespace get another one.

    Parameters
    ----------
    pickler : cloudpickle.Pickler
        The pickler of the functions.
    namespace : dict
        The functions' ``__globals__``, which must exist as long as the pickler.
    stand_in : dict
        What is pickled in its place. The names that the functions use are added when they are
        loaded.
    """
    pickler.globals_ref[id(namespace)] = stand_in


def with_functions(reduced: Any, make: Any, set_attributes: Any, argument: Any) -> Any:
    """Return how a class is pickled by value, with other functions that make it.

    Types of Python's own, such as that of None, are pickled in another way, which stays.

    Parameters
    ----------
    reduced : tuple
        What cloudpickle's ``reducer_override`` returns for the class.
    make : callable
        Called with cloudpickle's function and its arguments, by which `known_class` finds a class.
    set_attributes : callable
        Called with the class, and a tuple of cloudpickle's function, what that sets, and
        `argument`.
    """
    if len(reduced) < 6:
        return reduced
    own_make, args, state, items, pairs, own_setter = reduced
    return make, (own_make, *args), (own_setter, state, argument), items, pairs, set_attributes


def with_globals(reduced: Any, further: dict[str, Any]) -> Any:
    """Return how a function is pickled by value, with further globals.

    Parameters
    ----------
    reduced : tuple
        What cloudpickle's ``reducer_override`` returns for the function.
    further : dict of str to object
        Globals that cloudpickle has not found in the function's code.
    """
    make, args, (state, slots), *rest = reduced
    return make, args, (state, {**slots, "__globals__": further | slots["__globals__"]}), *rest


def known_class(arguments: tuple[Any, ...]) -> type | None:
    """Return the class that this process has already, by the arguments of a function to make it."""
    known: type | None = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])
    return known
