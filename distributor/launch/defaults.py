"""Defaults that an administrator sets for all runs, as environment variables or Spark properties.

Order of precedence: the argument, the driver's environment variable, the configuration of the
active Spark session, the built-in default. `ADMIN_DEFAULTS` lists all settings that have them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributor.core.addresses import checked_port, port_range
from distributor.core.paths import local_path
from distributor.launch.output.messages import warn
from distributor.launch.spark.session import Session
from distributor.node.environment.cache import CACHE_VARIABLE

CONF_TIMEOUT = 10.0
"""Seconds for a Connect server to return its configuration; its client would retry for minutes."""


@dataclass(frozen=True)
class AdminDefault:
    """The sources of a setting's default.

    Parameters
    ----------
    name : str
        The setting. The cache folder is not a setting but a variable in ``env``.
    variable : str
        The environment variable.
    key : str
        The Spark property.
    parse : callable
        Converts a text to the setting's value, or raises ValueError. It takes the name of the
        text's source, for the message, and the text.
    value : object
        The built-in default.
    shown : str
        The built-in default as documented.
    """

    name: str
    variable: str
    key: str
    parse: Callable[[str, str], Any]
    value: Any
    shown: str


class _NotGiven:
    """The type of `NOT_GIVEN`."""

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = _NotGiven()
"""The value of a setting that was not given and has an administrator's default."""


def folder(name: str, path: object) -> None:
    """Create a folder if it does not exist.

    Raises
    ------
    TypeError
        If `path` is not a path.
    NotADirectoryError
        If it, or a parent of it, is a file.
    """
    if path is None:
        return
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be the path of a folder, but is {path!r}.")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(
            f"{name} must be the path of a folder, but '{path}' or a parent of it is a file."
        ) from None


def _switch(name: str, text: str) -> bool:
    switches = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in switches:
        raise ValueError(f"{name} must be one of {', '.join(switches)}, but is {text!r}.")
    return switches[text.lower()]


def _port(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name} must be a port, or 0 for any free port, but is {text!r}.")
    return checked_port(name, int(text))


def _ports(name: str, text: str) -> str:
    port_range(name, text)
    return text


def _folder(name: str, text: str) -> str:
    path = local_path(text, name)
    folder(name, path)
    return path


def _absolute_path(name: str, text: str) -> str:
    if not Path(text).is_absolute() and not text.startswith("~"):
        raise ValueError(f"{name} must be the absolute path of a folder, but is {text!r}.")
    return text


CACHE_DIR = AdminDefault(
    f'env["{CACHE_VARIABLE}"]',
    CACHE_VARIABLE,
    "spark.distributor.cacheDir",
    _absolute_path,
    None,
    "`~/.cache/distributor`",
)
ADMIN_DEFAULTS = (
    AdminDefault("warm", "DISTRIBUTOR_WARM", "spark.distributor.warm", _switch, True, "True"),
    AdminDefault(
        "hub_port", "DISTRIBUTOR_HUB_PORT", "spark.distributor.hub.port", _port, 0, "any free port"
    ),
    AdminDefault(
        "rank_ports",
        "DISTRIBUTOR_RANK_PORTS",
        "spark.distributor.rank.ports",
        _ports,
        None,
        "any free port",
    ),
    AdminDefault(
        "log_dir", "DISTRIBUTOR_LOG_DIR", "spark.distributor.logDir", _folder, None, "none"
    ),
    CACHE_DIR,
)


def sources(name: str) -> str:
    """Return the sources of a setting's default, as a sentence for its documentation."""
    found = next(each for each in ADMIN_DEFAULTS if each.name == name)
    return (
        f"Default: the environment variable {found.variable}, the Spark property\n"
        f"    {found.key}, or {found.shown}."
    )


def complete(settings: object) -> None:
    """Replace each setting of a frozen dataclass that was not given by its default.

    Raises
    ------
    ValueError, OSError
        If a default is malformed. The message names the variable or property, and its value.
    """
    missing = [each for each in ADMIN_DEFAULTS if getattr(settings, each.name, None) is NOT_GIVEN]
    for name, value in _read_defaults(missing).items():
        object.__setattr__(settings, name, value)


def conf_cache_dir(session: Session | None) -> str | None:
    """Return the folder of the nodes' cache that a Spark property sets; None if it is not set.

    The variable takes precedence, but each node reads its own, because folders differ by machine.

    Raises
    ------
    ValueError
        If it is not an absolute path.
    """
    text = _conf(session, [CACHE_DIR.key]).get(CACHE_DIR.key)
    return _absolute_path(f"{CACHE_DIR.key} in Spark's conf", text) if text else None


def table() -> str:
    """Return the defaults as the table of docs/reference/settings.md."""
    rows = [
        f"| `{each.name}` | `{each.variable}` | `{each.key}` | {each.shown} |"
        for each in ADMIN_DEFAULTS
    ]
    head = ["| setting | environment variable | Spark conf | else |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


def _read_defaults(wanted: list[AdminDefault]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in wanted:
        if text := os.environ.get(each.variable):
            found[each.name] = each.parse(f"the environment variable {each.variable}", text)
    unset = {each.key: each for each in wanted if each.name not in found}
    conf = _conf(Session.active() if unset else None, list(unset))
    for key, each in unset.items():
        text = conf.get(key, "")
        found[each.name] = each.parse(f"{key} in Spark's conf", text) if text else each.value
    return found


def _conf(session: Session | None, keys: list[str]) -> Mapping[str, str]:
    """Return the properties among `keys` that a session's configuration sets."""
    if session is None:
        return {}
    reading: Future[dict[str, str]] = Future()

    def read() -> None:
        try:
            values = {key: session.conf(key) for key in keys}
            reading.set_result({key: text for key, text in values.items() if text is not None})
        except Exception as error:
            reading.set_exception(error)

    if session.is_connect:
        threading.Thread(target=read, name="distributor-conf", daemon=True).start()
    else:
        read()
    try:
        return reading.result(CONF_TIMEOUT)
    except Exception as error:  # its JVM or its server is gone
        warn(f"Spark's configuration cannot be read; spark.distributor.* is ignored: {error!r}")
        return {}
