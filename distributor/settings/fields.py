"""A setting as a field of a dataclass, and the documentation that is made of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from distributor.settings.types import SettingType

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


def setting(default: Any, kind: SettingType, text: str) -> Any:
    """Declare a setting: `text` says what it means, its unit, and what None stands for."""
    how: dict[str, Any] = {"default": default}
    if isinstance(default, dict):
        how = {"default_factory": dict, "repr": False}  # it may hold secrets
    elif isinstance(default, AdminDefault):
        how = {"default": NOT_GIVEN}
    return dataclasses.field(**how, metadata={"default": default, "type": kind, "text": text})


def setting_fields(settings: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are settings."""
    return [field for field in dataclasses.fields(settings) if "type" in field.metadata]


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
