"""The README's table of settings, from their descriptions.

Run as ``PYTHONPATH=tests python -m support.settings_table`` to rewrite it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import distributor
from distributor.launch.defaults import ADMIN_DEFAULTS, NOT_GIVEN
from distributor.launch.settings import Settings

README = Path(distributor.__file__).resolve().parent.parent / "README.md"
_SECTION = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- end -->)", re.DOTALL)


def settings_table() -> str:
    """Return the table as Markdown; a star marks defaults that an administrator can set."""
    rows = [
        f"| `{field.name}` | {_default(field)} | {_text(field)} |"
        for field in dataclasses.fields(Settings)
    ]
    return "\n".join(["| setting | default | description |", "| --- | --- | --- |", *rows])


def with_table(text: str) -> str:
    """Return the README with the table as the code has it."""
    return _SECTION.sub(lambda _: f"\n{settings_table()}\n\n", text)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is NOT_GIVEN:
        return next(each.shown for each in ADMIN_DEFAULTS if each.name == field.name) + " *"
    if isinstance(field.default, (bool, int, float, str)):
        return f"`{field.default!r}`" if isinstance(field.default, str) else f"{field.default:g}"
    return "none"


def _text(field: dataclasses.Field[Any]) -> str:
    return " ".join(field.metadata["text"].replace("``", "`").split())


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
