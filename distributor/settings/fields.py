"""A setting as a field of a dataclass, and the documentation that is made of it."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from distributor.node.environment.cache import CACHE_VARIABLE
from distributor.screen.messages import warn
from distributor.settings.types import SettingType
from distributor.spark.session import Session

T = TypeVar("T")


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = _NotGiven()
"""The value of a setting that was not given and has an administrator's default."""


@dataclasses.dataclass(frozen=True)
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
    return dataclasses.field(**how, metadata={**metadata, "reaches_ranks": reaches_ranks})


def setting_fields(settings: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are settings."""
    return [field for field in dataclasses.fields(settings) if "type" in field.metadata]


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


def help_of(field: dataclasses.Field[Any], options: Mapping[str, str]) -> str:
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


def _entry(field: dataclasses.Field[Any]) -> str:
    """Return a setting's entry of a numpydoc section."""
    text = re.sub(r"\n *", "\n    ", field.metadata["text"])
    if sources := _sources(field):
        text += f"\n    {sources}"
    return f"{field.name} : {field.metadata['type'].shown}{_default(field)}\n    {text}"


def _default(field: dataclasses.Field[Any]) -> str:
    plain = field.default in (True, False) or isinstance(field.default, (int, float, str))
    return f", default {field.default!r}" if plain else ", optional"


def _sources(field: dataclasses.Field[Any]) -> str:
    default = field.metadata["default"]
    if not isinstance(default, AdminDefault):
        return ""
    return (
        f"Default: the environment variable {default.variable}, the Spark property\n"
        f"    {default.key}, or {default.shown}."
    )


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
    wanted = {
        name: default
        for name, default in admin_defaults(settings).items()
        if getattr(settings, name) is NOT_GIVEN
    }
    texts = {
        name: (f"the environment variable {each.variable}", text)
        for name, each in wanted.items()
        if (text := os.environ.get(each.variable))
    }
    unset = {name: each.key for name, each in wanted.items() if name not in texts}
    conf = _conf(Session.active() if unset else None, unset.values())
    texts |= {name: (_source(key), text) for name, key in unset.items() if (text := conf.get(key))}
    types = {field.name: field.metadata["type"] for field in setting_fields(settings)}
    for name, default in wanted.items():
        value = types[name].read(*texts[name]) if name in texts else default.value
        object.__setattr__(settings, name, value)


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
