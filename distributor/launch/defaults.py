"""Defaults that an administrator sets for all runs: by environment variables and Spark's conf.

Order of precedence: the argument, the driver's environment variable, the conf of the active Spark
session, the built-in default. `DEFAULTS` is the one list of what can be set so.
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
from distributor.launch.console import warn
from distributor.launch.spark.session import Session
from distributor.node.environment.build_once import CACHE_VARIABLE

CONF_SECONDS = 10.0
"""Seconds that a Connect server has to tell its conf; its client would retry for minutes."""


@dataclass(frozen=True)
class Default:
    """How a setting's default is found.

    Parameters
    ----------
    name : str
        The setting; the cache folder is no setting, but a variable in ``env``.
    variable : str
        The environment variable.
    key : str
        The key in Spark's conf.
    parse : callable
        Makes the setting's value of a source's name and its text, or raises ValueError.
    value : object
        The built-in default.
    shown : str
        How the documentation calls that.
    """

    name: str
    variable: str
    key: str
    parse: Callable[[str, str], Any]
    value: Any
    shown: str


class FromDefaults:
    """Stands for a setting that was not given."""

    def __repr__(self) -> str:
        return "<see DEFAULTS>"


NOT_GIVEN: Any = FromDefaults()


def folder(name: str, path: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Return a folder, which is made if it is not there.

    Raises
    ------
    TypeError
        If it is no path.
    NotADirectoryError
        If there is a file at the path or above it.
    """
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} is the path of a folder, but is {path!r}.")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(
            f"{name} is the path of a folder, but at '{path}' or above it is a file."
        ) from None
    return path


def _switch(name: str, text: str) -> bool:
    switches = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in switches:
        raise ValueError(f"{name} is one of {', '.join(switches)}, but is {text!r}.")
    return switches[text.lower()]


def _port(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name} is a port, or 0 for a free one, but is {text!r}.")
    return checked_port(name, int(text))


def _ports(name: str, text: str) -> str:
    port_range(name, text)
    return text


def _path(name: str, text: str) -> str:
    if not Path(text).is_absolute():
        raise ValueError(f"{name} is the absolute path of a folder, but is {text!r}.")
    return text


CACHE_DIR = Default(
    f'env["{CACHE_VARIABLE}"]',
    CACHE_VARIABLE,
    "spark.distributor.cacheDir",
    _path,
    None,
    "`~/.cache/distributor`",
)
DEFAULTS = (
    Default("warm", "DISTRIBUTOR_WARM", "spark.distributor.warm", _switch, True, "True"),
    Default("hub_port", "DISTRIBUTOR_HUB_PORT", "spark.distributor.hub.port", _port, 0, "any free"),
    Default(
        "rank_ports",
        "DISTRIBUTOR_RANK_PORTS",
        "spark.distributor.rank.ports",
        _ports,
        None,
        "any free",
    ),
    Default("log_dir", "DISTRIBUTOR_LOG_DIR", "spark.distributor.logDir", folder, None, "none"),
    CACHE_DIR,
)


def complete(settings: object) -> None:
    """Replace each setting of a frozen dataclass that was not given by its default.

    Raises
    ------
    ValueError, OSError
        If a default is malformed; names the variable or the key, and the value.
    """
    missing = [each for each in DEFAULTS if getattr(settings, each.name, None) is NOT_GIVEN]
    for name, value in _found(missing).items():
        object.__setattr__(settings, name, value)


def conf_cache_dir(session: Session | None) -> str | None:
    """Return the folder of the nodes' cache that Spark's conf names; None if it names none.

    The variable comes first, but each node reads its own: folders differ by machine.

    Raises
    ------
    ValueError
        If it is no absolute path.
    """
    text = _conf(session, [CACHE_DIR.key]).get(CACHE_DIR.key)
    return _path(f"{CACHE_DIR.key} in Spark's conf", text) if text else None


def table() -> str:
    """Write the defaults as the README's table."""
    rows = [
        f"| `{each.name}` | `{each.variable}` | `{each.key}` | {each.shown} |" for each in DEFAULTS
    ]
    head = ["| setting | environment variable | Spark conf | else |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


def _found(wanted: list[Default]) -> dict[str, Any]:
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
    """Read what is set in a session's conf."""
    if session is None:
        return {}
    reading: Future[dict[str, str]] = Future()

    def read() -> None:
        try:
            told = {key: session.conf(key) for key in keys}
            reading.set_result({key: text for key, text in told.items() if text is not None})
        except Exception as error:
            reading.set_exception(error)

    if session.is_connect:
        threading.Thread(target=read, name="distributor-conf", daemon=True).start()
    else:
        read()
    try:
        return reading.result(CONF_SECONDS)
    except Exception as error:  # its JVM or its server has gone
        warn(f"Spark's conf cannot be read, so that spark.distributor.* is ignored: {error!r}")
        return {}
