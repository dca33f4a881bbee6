"""Descriptions of settings as fields of a dataclass, and the documentation that is made of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from distributor.launch import setting_checks as checks
from distributor.launch.defaults import NOT_GIVEN, sources

T = TypeVar("T")


def setting(
    default: Any, type_: str, text: str, check: checks.Check = lambda name, value: None
) -> Any:
    """Declare a setting as a field of a dataclass.

    Parameters
    ----------
    default : object
        The default; `NOT_GIVEN` if an administrator can set it.
    type_ : str
        The type, as documented.
    text : str
        The description: what it means, its unit, and a default that is not a plain value.
    check : callable
        Raises an error if a value, given with the setting's name, is invalid.
    """
    how: dict[str, Any] = {"default": default}
    if isinstance(default, dict):
        how = {"default_factory": dict, "repr": False}  # it may hold secrets
    return dataclasses.field(**how, metadata={"type": type_, "text": text, "check": check})


def documented(settings: type | None = None, *, skip: Collection[str] = ()) -> Callable[[T], T]:
    """Return a decorator that replaces ``{settings}`` in a docstring by their descriptions.

    Parameters
    ----------
    settings : type, optional
        The dataclass of the settings; by default the decorated class.
    skip : collection of str
        Settings that are left out.
    """

    def decorate(target: T) -> T:
        if target.__doc__ and (found := re.search(r"^( *)\{settings\}", target.__doc__, re.M)):
            listed = [*dataclasses.fields(settings or target)]  # type: ignore[arg-type]
            listed.sort(key=lambda field: bool(field.kw_only))  # in the order of the signature
            entries = "\n".join(_entry(field) for field in listed if field.name not in skip)
            indented = entries.replace("\n", f"\n{found[1]}")
            target.__doc__ = target.__doc__.replace("{settings}", indented)
        return target

    return decorate


def _entry(field: dataclasses.Field[Any]) -> str:
    """Return a setting's entry of a numpydoc section."""
    text = re.sub(r"\n *", "\n    ", field.metadata["text"])
    if field.default is NOT_GIVEN:
        text += f"\n    {sources(field.name)}"
    return f"{field.name} : {field.metadata['type']}{_default(field)}\n    {text}"


def _default(field: dataclasses.Field[Any]) -> str:
    plain = field.default in (True, False) or isinstance(field.default, (int, float, str))
    return f", default {field.default!r}" if plain else ", optional"


def help_of(field: dataclasses.Field[Any]) -> str:
    """Return a setting's description for the command line."""
    text = " ".join(field.metadata["text"].replace("`", "").split())
    if field.default is NOT_GIVEN:
        return f"{text} {' '.join(sources(field.name).split())}"
    default = _default(field).removeprefix(", ").removesuffix("optional").replace("'", "")
    return f"{text} ({default})" if default else text
