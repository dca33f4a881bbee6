"""Checks of settings, before anything is launched. Each names the setting and what was found."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from distributor.core.gpus import GPUType
from distributor.core.paths import absolute
from distributor.launch.run_listener import Listener
from distributor.node.agent.worker_env import RANK_VARIABLES

Check = Callable[[str, object], object]
"""Takes a setting's name and value; raises TypeError, ValueError or OSError if it is invalid."""


def check_num_processes(num_processes: object, name: str = "num_processes") -> tuple[int, int]:
    """Check a number of ranks or a (minimum, maximum) pair, and return it as a pair.

    The messages are those of PySpark's class, if it has one for the case.

    Parameters
    ----------
    num_processes : object
        The number, or a tuple or list of two.
    name : str
        What the user's API calls it.

    Raises
    ------
    TypeError
        If it is neither an integer nor a pair of them.
    ValueError
        If a number is not positive, or the minimum is greater than the maximum.
    """
    if not isinstance(num_processes, (tuple, list)):
        count = check_count(name, num_processes)
        return count, count
    expected = f"{name} as a pair must be (minimum, maximum), but is {num_processes}"
    if len(num_processes) != 2:
        raise TypeError(f"{expected}.")
    min_processes, max_processes = (check_count(name, count) for count in num_processes)
    if min_processes > max_processes:
        raise ValueError(f"{expected}: the minimum is greater than the maximum.")
    return min_processes, max_processes


def check_count(name: str, count: object) -> int:
    """Check a positive number, and return it as an int."""
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(
            f"{name} has to be a positive integer, but is {count!r} of type {_type_of(count)}."
        )
    number = int(count.__index__())
    if number <= 0:
        raise ValueError(f"{name} has to be a positive integer, but is {number}.")
    return number


def check_bool(name: str, value: object) -> None:
    """Check a switch: True or False, as NumPy's booleans too, or 1 or 0."""
    of_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not of_numpy and not (isinstance(value, int) and value in (0, 1)):
        raise TypeError(
            f"{name} must be True or False, but is {value!r} of type {_type_of(value)}."
        )


def check_max_failures(name: str, count: object) -> None:
    """Check ``max_failures``: a number of attempts, or -1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < -1:
        raise ValueError(
            f"{name} must be a number of failed attempts, or -1 for no limit, but is {count!r}."
        )


def check_max_preemption_failures(name: str, count: object) -> None:
    """Check ``max_preemption_failures``: a number of attempts, -1 or None."""
    if count is not None:
        check_max_failures(name, count)


def check_env(name: str, env: object) -> None:
    """Check ``env``: variables that the launcher does not set itself."""
    if not isinstance(env, Mapping):
        raise TypeError(
            f"{name} must map strings to strings, but is {env!r} of type {_type_of(env)}."
        )
    for variable, value in env.items():
        if not isinstance(variable, str) or not isinstance(value, str):
            raise TypeError(
                f"{name} must map strings to strings, but has {variable!r}: {value!r} "
                f"({_type_of(variable)} to {_type_of(value)})."
            )
        if not variable or "=" in variable or "\0" in variable:
            raise ValueError(
                f"{name} has {variable!r}, which is not a valid name of an environment variable."
            )
        if "\0" in value:
            raise ValueError(f"{name} has a NUL character in the value of {variable}.")
        try:
            os.fsencode(f"{variable}={value}")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} sets {variable!r} to {value!r}, which no environment variable can hold: "
                f"{error.reason}."
            ) from None
        if variable in RANK_VARIABLES:
            raise ValueError(
                f"{name} must not set {variable}: the launcher sets it, and it differs by rank."
            )


def check_timeout(name: str, seconds: object) -> None:
    """Check ``timeout``: seconds, or None."""
    if seconds is not None:
        _check_seconds(f"{name} must be a positive, finite number of seconds, or None", seconds)


def check_start_timeout(name: str, seconds: object) -> None:
    """Check ``start_timeout``: seconds."""
    _check_seconds(f"{name} must be a positive, finite number of seconds", seconds)


def _check_seconds(expected: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{expected}, but is {seconds!r}.")
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{expected}, but is {seconds!r}.")


def check_shown_ranks(name: str, shown: object) -> None:
    """Check ``show_output``: ranks, or all or none of them."""
    if isinstance(shown, str):
        is_valid = shown in ("all", "none")
    else:
        is_valid = isinstance(shown, Collection) and all(
            isinstance(rank, int) and rank >= 0 for rank in shown
        )
    if not is_valid:
        raise ValueError(
            f"{name} must be 'all', 'none' or a list of ranks such as [0], but is {shown!r}."
        )


def check_strings(what: str) -> Check:
    """Return a check for a list of strings; `what` says in the error what they are."""

    def check(name: str, strings: object) -> None:
        if (
            isinstance(strings, str)
            or not isinstance(strings, Sequence)
            or not all(isinstance(each, str) for each in strings)
        ):
            raise TypeError(f"{name} must be a list of {what}, but is {strings!r}.")

    return check


def check_gpu_type(name: str, gpu_type: object) -> None:
    """Check ``gpu_type``: a known type in upper or lower case, or None."""
    known = [kind.value for kind in GPUType]
    if gpu_type is not None and (not isinstance(gpu_type, str) or gpu_type.upper() not in known):
        raise ValueError(f"{name} must be one of {', '.join(known)}, but is {gpu_type!r}.")


def check_pool(name: str, pool: object) -> None:
    """Check ``pool``: a name that is not empty, or None."""
    if pool is not None and not (isinstance(pool, str) and pool):
        raise ValueError(
            f"{name} must be the name of a pool of Spark's fair scheduler, but is {pool!r}."
        )


def check_mlflow_ranks(name: str, ranks: object) -> None:
    """Check ``mlflow_ranks``: which ranks log."""
    if ranks not in ("first", "all"):
        raise ValueError(f"{name} must be 'first' or 'all', but is {ranks!r}.")


def check_storage_path(name: str, path: object) -> None:
    """Check ``storage_path``: a path, a URI or None.

    Raises
    ------
    TypeError
        If it is neither.
    ValueError
        If it is an incomplete URI, or has something that only a shell replaces.
    """
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path or a URI, but is {path!r}.")
    if path is not None:
        absolute(path, name)


def check_listeners(name: str, listeners: object) -> None:
    """Check ``listeners``: objects of `Listener` classes."""
    if not isinstance(listeners, Sequence) or not all(isinstance(x, Listener) for x in listeners):
        raise TypeError(f"{name} must be a list of Listener objects, but is {listeners!r}.")


_IGNORED: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (
        ("pool", "hub_address", "hub_port"),
        lambda settings: settings.local_mode,
        "the ranks run on this machine, without Spark",
    ),
    (("gpu_type",), lambda settings: not settings.use_gpu, "the ranks have no GPUs"),
    (
        ("preload",),
        lambda settings: not settings.warm,
        "each rank starts a new interpreter (warm is off)",
    ),
]
"""Settings, when they have no effect, and why."""


def ignored_settings(settings: Any, given: Collection[str]) -> list[str]:
    """Return a message for each group of settings that the others make meaningless.

    Parameters
    ----------
    settings : TorchDistributor
        All settings.
    given : collection of str
        The settings that the user has chosen.
    """
    groups = (
        ([settings.spelling.of(name) for name in names if name in given], reason)
        for names, is_ignored, reason in _IGNORED
        if is_ignored(settings)
    )
    return [
        f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: {reason}."
        for names, reason in groups
        if names
    ]


def _type_of(value: object) -> str:
    return type(value).__name__
