"""Settings: their types, their fields and defaults, and the interface of listeners.

A type says how values are checked, documented, and read from texts and command lines. A field of a
dataclass has a type, a default and a description, of which the documentation is made.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from distributor.core.addresses import checked_port, port_range, split_address
from distributor.core.files import absolute, local_path
from distributor.core.gpus import GPUType
from distributor.core.rank_variables import check_name
from distributor.core.threads import in_background
from distributor.core.versions import require_arrow
from distributor.node.agent.worker_env import RANK_VARIABLES
from distributor.node.cache import CACHE_VARIABLE
from distributor.rank.messages import Progress, Reported
from distributor.screen.messages import warn
from distributor.spark.session import Session
from distributor.wire.messages import Stream

T = TypeVar("T")


class Listener:
    """Follows a run on the driver: subclass it, and override the methods of interest.

    All methods are called in the order of events on a thread of the run's own, so an MLflow run
    that is active on the thread of the caller is not active in them. By default each does nothing.
    If a method raises, the run ends with that exception, and no method is called after it. The
    ranks' events of one attempt come between its `begins` and the next one, or the end of the run.

    A run never waits for a method while its ranks are at work. If methods are too slow, `printed`,
    `progressed` and `used` are not called for each event; a warning says so. At its end a run waits
    for the calls that are left, at most 60 s for each one.

    See Also
    --------
    TorchDistributor : takes listeners as its setting ``listeners``.

    Examples
    --------
    >>> class Losses(Listener):
    ...     def __init__(self):
    ...         self.losses = []
    ...     def progressed(self, rank, progress):
    ...         self.losses.append((rank, progress.done, progress.metrics["loss"]))
    >>> TorchDistributor(2, listeners=[Losses()]).run(train)  # doctest: +SKIP
    """

    def begins(self, attempt: int, ranks: int) -> None:
        """Handle the start of an attempt.

        Parameters
        ----------
        attempt : int
            The number of the attempt, from 0.
        ranks : int
            The number of its ranks.
        """

    def printed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Handle a rank's output.

        Parameters
        ----------
        rank : int
            The rank.
        stream : "stdout" or "stderr"
            The stream that it wrote to.
        data : bytes
            The output, cut at any byte.
        """

    def progressed(self, rank: int, progress: Progress) -> None:
        """Handle a rank's call of ``distributor.runtime.progress``.

        Parameters
        ----------
        rank : int
            The rank.
        progress : Progress
            The progress and metrics that it reported.
        """

    def used(self, usage: Progress) -> None:
        """Handle a node's use of its processors, memory, network and GPUs.

        Parameters
        ----------
        usage : Progress
            Its metrics.
        """

    def reported(self, report: Reported) -> None:
        """Handle a report that all ranks made with ``distributor.train.report``.

        Parameters
        ----------
        report : Reported
            The metrics of all ranks, and the checkpoint.
        """

    def failed(self, attempt: int, error: Exception) -> None:
        """Handle the failure of an attempt. It is not called if the run is cancelled.

        Parameters
        ----------
        attempt : int
            The number of the attempt, from 0.
        error : Exception
            The error; ``error.rank_failures`` maps each failed rank to its failure.
        """


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
    of a variable or property and its text, and returns what `convert` takes.
    """

    shown: str
    check: Check
    options: tuple[Option, ...] = (option(metavar="TEXT"),)
    convert: Callable[[str, Any], Any] = lambda name, value: value
    read: Callable[[str, str], Any] = lambda name, text: text

    def with_options(self, *options: Option) -> SettingType:
        return replace(self, options=options)


# Validators


def must_be(expected: str, is_valid: Predicate, error: type[Exception] = ValueError) -> Check:
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
    return int(text)


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
    read=lambda name, text: local_path(text, name),
)
FOLDER_NAME = SettingType("str", optional(check_name), (option(metavar="NAME"),))
STORAGE = SettingType("str or path", check_storage_path, (option(metavar="PATH"),))
HOST = SettingType("str", optional(split_address), (option(metavar="HOST[:PORT]"),))
PORT = SettingType("int", checked_port, (option(type=int, metavar="PORT"),), read=_read_port)
PORTS = SettingType("str", port_range, (option(metavar="FIRST-LAST"),))
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
    check = must_be(f"a list of {what}", items(Sequence, instance_of(str)), TypeError)
    return SettingType("sequence of str", check, (several(help),))


def one_of(first: str, second: str) -> SettingType:
    return SettingType(
        f'"{first}" or "{second}"',
        must_be(f"{first!r} or {second!r}", in_(first, second)),
        (option(metavar=f"{first}|{second}"),),
    )


# Fields


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = _NotGiven()
"""The value of a setting that was not given and has an administrator's default."""


@dataclass(frozen=True)
class AdminDefault:
    """A default that an environment variable or a Spark property can set.

    Without them it is `value`, which the documentation shows as `shown`.
    """

    variable: str
    key: str
    value: Any
    shown: str


def setting(
    default: Any, kind: SettingType, text: str, *, group: str = "", reaches_ranks: bool = False
) -> Any:
    """Declare a setting: `text` says what it means, its unit, and what None stands for.

    `group` is that of its option in the help of ``distributor run``; without one, it has none.
    """
    how: dict[str, Any] = {"default": default}
    if isinstance(default, dict):
        how = {"default_factory": dict, "repr": False}  # it may hold secrets
    elif isinstance(default, AdminDefault):
        how = {"default": NOT_GIVEN}
    metadata = {"default": default, "type": kind, "text": text, "group": group}
    return field(**how, metadata={**metadata, "reaches_ranks": reaches_ranks})


def setting_fields(settings: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass that are settings."""
    return [field for field in fields(settings) if "type" in field.metadata]


def rank_settings(settings: Any) -> SimpleNamespace:
    """Return the settings that nodes and ranks get."""
    reaching = [each.name for each in setting_fields(settings) if each.metadata["reaches_ranks"]]
    return SimpleNamespace(**{name: _plain(getattr(settings, name)) for name in reaching})


def _plain(value: Any) -> Any:
    """Replace a list by a tuple; nodes may lack the class of a user's sequence."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def admin_defaults(settings: Any) -> dict[str, AdminDefault]:
    """Return the defaults that administrators can set, by setting."""
    defaults = {field.name: field.metadata["default"] for field in setting_fields(settings)}
    return {name: each for name, each in defaults.items() if isinstance(each, AdminDefault)}


def documented(settings: type | None = None, *, skip: Collection[str] = ()) -> Callable[[T], T]:
    """Return a decorator that replaces ``{settings}`` in a docstring by their descriptions.

    They are by default those of the decorated class.
    """

    def decorate(target: T) -> T:
        if target.__doc__ and (found := re.search(r"^( *)\{settings\}", target.__doc__, re.M)):
            listed = setting_fields(settings or target)
            listed.sort(key=lambda field: bool(field.kw_only))  # in the order of the signature
            entries = "\n".join(_entry(field) for field in listed if field.name not in skip)
            indented = entries.replace("\n", f"\n{found[1]}")
            target.__doc__ = target.__doc__.replace("{settings}", indented)
        return target

    return decorate


def help_of(field: Field[Any], options: Mapping[str, str]) -> str:
    """Return what a setting means in one sentence, for the command line.

    Parameters
    ----------
    field : Field
        The setting.
    options : mapping of str to str
        The options of settings, by which the sentence names them.
    """
    sentence = re.split(r"\.\s+(?=[A-Z])", field.metadata["text"])[0].removesuffix(".")
    named = re.sub(r"`(\w+)`", lambda found: options.get(found[1], found[1]), sentence)
    text = " ".join(named.replace("`", "").split())
    text = text[0].lower() + text[1:]
    default = field.metadata["default"]
    if isinstance(default, AdminDefault):
        return f"{text} (default: ${default.variable}, {default.key}, or {default.shown})"
    if isinstance(default, (int, float, str)) and not isinstance(default, bool):
        return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"
    return text


def _entry(field: Field[Any]) -> str:
    """Return a setting's entry of a numpydoc section."""
    text = re.sub(r"\n *", "\n    ", field.metadata["text"])
    if isinstance(default := field.metadata["default"], AdminDefault):
        text += (
            f"\n    Default: the environment variable {default.variable}, the Spark property\n"
            f"    {default.key}, or {default.shown}."
        )
    return f"{field.name} : {field.metadata['type'].shown}{_default(field)}\n    {text}"


def _default(field: Field[Any]) -> str:
    plain = field.default in (True, False) or isinstance(field.default, (int, float, str))
    return f", default {field.default!r}" if plain else ", optional"


# Order of precedence: the argument, the driver's environment variable, the configuration of the
# active Spark session, the built-in default.

CONF_TIMEOUT = 10.0
"""Seconds for a Connect server to return its configuration; its client would retry for minutes."""
CACHE_DIR = AdminDefault(
    CACHE_VARIABLE, "spark.distributor.cacheDir", None, "`~/.cache/distributor`"
)
"""The default of a variable in ``env``. Each node reads its own: folders differ by machine."""


def complete(settings: object) -> None:
    """Replace each setting of a frozen dataclass that was not given by its default."""
    wanted = [
        each for each in setting_fields(settings) if getattr(settings, each.name) is NOT_GIVEN
    ]
    defaults = [each.metadata["default"] for each in wanted]
    unset = [each.key for each in defaults if not os.environ.get(each.variable)]
    conf = _conf(Session.active() if unset else None, unset)
    for each, default in zip(wanted, defaults, strict=True):
        kind, value, source = each.metadata["type"], default.value, _source(default.key)
        if text := os.environ.get(default.variable):
            source = f"the environment variable {default.variable}"
        if text := text or conf.get(default.key):
            value = kind.convert(source, kind.read(source, text))
            kind.check(source, value)
        object.__setattr__(settings, each.name, value)


def conf_cache_dir(session: Session | None) -> str | None:
    """Return the folder of the nodes' cache that a Spark property sets; None if it is not set."""
    path = _conf(session, [CACHE_DIR.key]).get(CACHE_DIR.key)
    if path and not Path(path).is_absolute() and not path.startswith("~"):
        source = _source(CACHE_DIR.key)
        raise ValueError(f"{source} must be the absolute path of a folder, but is {path!r}.")
    return path or None


def _source(key: str) -> str:
    return f"{key} in Spark's conf"


def _conf(session: Session | None, keys: Iterable[str]) -> Mapping[str, str]:
    """Return the properties among `keys` that a session's configuration sets."""
    if session is None:
        return {}

    def read() -> dict[str, str]:
        values = {key: session.conf(key) for key in keys}
        return {key: text for key, text in values.items() if text is not None}

    try:
        if session.is_connect:
            return in_background(read, "distributor-conf").result(CONF_TIMEOUT)
        return read()
    except Exception as error:  # its JVM or its server is gone
        warn(f"Spark's configuration cannot be read; spark.distributor.* is ignored: {error!r}")
        return {}
