"""The exceptions of the package, found in its source."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import distributor

SOURCE = Path(distributor.__file__).parent


def error_classes() -> dict[str, type[BaseException]]:
    """Return all exceptions of the package that are not private, by name."""
    found: dict[str, type[BaseException]] = {}
    for file in SOURCE.rglob("*.py"):
        if re.search(r"^class \w+\(", file.read_text(), re.MULTILINE):
            module = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
            found |= _errors_of(module.removesuffix(".__init__"))
    return found


def _errors_of(module: str) -> dict[str, type[BaseException]]:
    try:
        things = vars(importlib.import_module(module))
    except ImportError:  # a framework is not installed
        return {}
    return {
        name: thing
        for name, thing in things.items()
        if isinstance(thing, type) and issubclass(thing, BaseException)
        if thing.__module__ == module and not name.startswith("_")
    }
