"""Types of settings: how values are checked, documented, and read from texts and command lines."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributor.core.addresses import checked_port, port_range, split_address
from distributor.core.files import absolute, local_path
from distributor.core.gpus import GPUType
from distributor.core.rank_variables import check_name
from distributor.core.versions import require_arrow
from distributor.node.agent.worker_env import RANK_VARIABLES
from distributor.settings.listener import Listener

Check = Callable[[str, Any], object]
"""Takes a setting's name and value; raises TypeError, ValueError or OSError if it is invalid."""
Predicate = Callable[[Any], bool]
Option = tuple[tuple[str, ...], dict[str, Any]]
"""Flags and other arguments of an option of argparse; ``{}`` in a flag is the setting's name."""


def option(*flags: str, **arguments: Any) -> Option:
    return flags or ("--{}",), arguments


@dataclass(frozen=True)
class SettingType:
    """A type of settings.

    `convert` takes what `check` takes, and returns the value that is kept; `read` takes the name
    of a variable or property and its text.
    """

    shown: str
    check: Check
    options: tuple[Option, ...] = (option(metavar="TEXT"),)
    convert: Callable[[str, Any], Any] = lambda name, value: value
    read: Callable[[str, str], Any] = lambda name, text: text

    def with_options(self, *options: Option) -> SettingType:
        return replace(self, options=options)


# Validators


def must_be(
    expected: str, is_valid: Predicate, error: type[Exception] = ValueError
) -> Callable[[str, Any], None]:
    def check(name: str, value: object) -> None:
        if not is_valid(value):
            raise error(f"{name} must be {expected}, but is {value!r}.")

    return check


def both(*checks: Check) -> Check:
    def check(name: str, value: object) -> None:
        for each in checks:
            each(name, value)

    return check


def optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def instance_of(*types: type) -> Predicate:
    return lambda value: isinstance(value, types)


def number_of(*types: type) -> Predicate:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def ge(limit: int) -> Predicate:
    return lambda value: bool(value >= limit)


def in_(*values: object) -> Predicate:
    return lambda value: value in values


def all_of(*predicates: Predicate) -> Predicate:
    return lambda value: all(each(value) for each in predicates)


def any_of(*predicates: Predicate) -> Predicate:
    return lambda value: any(each(value) for each in predicates)


def items(kind: Any, is_valid: Predicate) -> Predicate:
    """Accept a collection of this kind, except a str, whose items are valid."""
    return lambda value: (
        isinstance(value, kind)
        and not isinstance(value, str)
        and all(is_valid(each) for each in value)
    )


# Checks that are used for parameters of other interfaces too


def check_num_processes(name: str, num_processes: object) -> tuple[int, int]:
    """Check a number of ranks or a (minimum, maximum) pair, and return it as a pair.

    The messages are those of PySpark's class, if it has one for the case.
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


check_max_failures = must_be(
    "a number of failed attempts, or -1 for no limit", all_of(number_of(int), ge(-1))
)


def check_env(name: str, env: object) -> None:
    """Check environment variables, among which are none that the launcher sets itself."""
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


def _seconds(expected: str) -> Check:
    return both(
        must_be(expected, number_of(int, float), TypeError),
        must_be(expected, lambda seconds: math.isfinite(seconds) and seconds > 0),
    )


check_timeout = optional(_seconds("a positive, finite number of seconds, or None"))


def _is_gpu_type(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(GPUType(value))
    except ValueError:
        return False


check_gpu_type = optional(must_be(f"one of {', '.join(GPUType)}", _is_gpu_type))


def _check_storage(name: str, path: Any) -> None:
    absolute(path, name)
    require_arrow(name)


check_storage_path = optional(
    both(must_be("a path or a URI", instance_of(str, os.PathLike), TypeError), _check_storage)
)

check_listeners = must_be(
    "a list of Listener objects", items(Sequence, instance_of(Listener)), TypeError
)


def create_folder(name: str, path: Any) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(
            f"{name} must be the path of a folder, but '{path}' or a parent of it is a file."
        ) from None
    except OSError as error:
        raise OSError(
            f"{name} is '{path}', which cannot be created ({error.strerror}): choose a folder "
            "that this process can write to."
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(
            f"{name} is '{path}', to which this process cannot write: choose another folder, or "
            "change its permissions."
        )


def checked_path(name: str, value: Any) -> Any:
    """Check a path, and replace what depends on this machine, as ``~`` does; nodes may differ."""
    if not isinstance(value, (str, os.PathLike)):
        return value
    path = local_path(value, name)
    return path if os.fspath(value).startswith(("~", "file:")) else value


def _type_of(value: object) -> str:
    return type(value).__name__


# Texts of the command line, of variables and of properties


def read_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    return name, value


def _number_of_ranks(text: str) -> int | tuple[int, int]:
    try:
        counts = tuple(int(count) for count in text.split(","))
    except ValueError:
        counts = ()
    match counts:
        case (count,):
            return count
        case (min_processes, max_processes):
            return min_processes, max_processes
    raise argparse.ArgumentTypeError(
        f"expected a number of ranks, or minimum and maximum such as 2,4; found {text!r}"
    )


def _ranks(text: str) -> str | tuple[int, ...]:
    if text in ("all", "none"):
        return text
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected 'all', 'none' or ranks such as 0,3; found {text!r}"
        ) from None


def _read_switch(name: str, text: str) -> bool:
    switches = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in switches:
        raise ValueError(f"{name} must be one of {', '.join(switches)}, but is {text!r}.")
    return switches[text.lower()]


def _read_port(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name} must be a port, or 0 for any free port, but is {text!r}.")
    return checked_port(name, int(text))


def _read_ports(name: str, text: str) -> str:
    port_range(name, text)
    return text


def _read_folder(name: str, text: str) -> str:
    path = local_path(text, name)
    create_folder(name, path)
    return path


# Types


def several(help: str) -> Option:
    """Return an option that may be repeated."""
    return option(action="append", metavar="NAME", help=f"{help}; may be repeated")


NUMBER = option(type=int, metavar="N")

ENV = SettingType(
    "mapping of str to str",
    check_env,
    (
        option(
            type=read_pair,
            action="append",
            metavar="NAME=VALUE",
            help="an environment variable of every rank; may be repeated",
        ),
    ),
)
SWITCH = SettingType(
    "bool", check_bool, (option(action=argparse.BooleanOptionalAction),), read=_read_switch
)
SWITCH_IF_ANY = replace(SWITCH, shown="bool or None", check=optional(check_bool))
SECONDS = SettingType(
    "float",
    _seconds("a positive, finite number of seconds"),
    (option(type=float, metavar="SECONDS"),),
)
SECONDS_IF_ANY = replace(SECONDS, check=check_timeout)
RANKS = SettingType(
    "int or (int, int)",
    check_num_processes,
    (option("--nproc", "--{}", type=_number_of_ranks, metavar="N[,MAX]"),),
)
SHOWN_RANKS = SettingType(
    '"all", "none" or collection of int',
    must_be(
        "'all', 'none' or a list of ranks such as [0]",
        any_of(in_("all", "none"), items(Collection, all_of(instance_of(int), ge(0)))),
    ),
    (option(type=_ranks, metavar="RANKS"),),
)
FAILURES = SettingType("int", check_max_failures, (NUMBER,))
FAILURES_IF_ANY = replace(FAILURES, check=optional(check_max_failures))
FOLDER = SettingType(
    "str or path",
    optional(
        both(
            must_be("the path of a folder", instance_of(str, os.PathLike), TypeError), create_folder
        )
    ),
    (option(metavar="FOLDER"),),
    convert=checked_path,
    read=_read_folder,
)
FOLDER_NAME = SettingType("str", optional(check_name), (option(metavar="NAME"),))
STORAGE = SettingType("str or path", check_storage_path, (option(metavar="PATH"),))
HOST = SettingType("str", optional(split_address), (option(metavar="HOST[:PORT]"),))
PORT = SettingType("int", checked_port, (option(type=int, metavar="PORT"),), read=_read_port)
PORTS = SettingType("str", port_range, (option(metavar="FIRST-LAST"),), read=_read_ports)
GPU_TYPE = SettingType("GPUType or str", check_gpu_type, (option(metavar="TYPE"),))
POOL = SettingType(
    "str",
    optional(
        must_be("the name of a pool of Spark's fair scheduler", all_of(instance_of(str), bool))
    ),
    (option(metavar="NAME"),),
)
LISTENERS = SettingType(
    "Listener or sequence of Listener",
    check_listeners,
    (),  # Python objects
    convert=lambda name, value: (value,) if isinstance(value, Listener) else value,
)


def strings(what: str, help: str) -> SettingType:
    """Return the type of lists of strings, with what they are, and the help of its option."""
    is_valid = items(Sequence, instance_of(str))
    return SettingType(
        "sequence of str",
        must_be(f"a list of {what}", is_valid, TypeError),
        (several(help),),
    )


def one_of(first: str, second: str) -> SettingType:
    return SettingType(
        f'"{first}" or "{second}"',
        must_be(f"{first!r} or {second!r}", in_(first, second)),
        (option(metavar=f"{first}|{second}"),),
    )
