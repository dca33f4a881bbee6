"""The documentation's list of messages has each message of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import PAGES

import distributor

pytestmark = pytest.mark.repository

FUNCTIONS = {"notify", "warn", "warn_once", "_warn_once"}
PAGE = PAGES / "reference" / "messages.md"


def messages_in(source: str) -> Iterator[str]:
    """Return the messages in calls of `FUNCTIONS`, with ``…`` for what is formatted."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and _name(call.func) in FUNCTIONS:
            yield from filter(None, map(_text, call.args))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(argument: ast.expr) -> str:
    """Return the text of a literal; empty for other expressions, and for a single word."""
    if isinstance(argument, ast.JoinedStr):
        return "".join(str(getattr(part, "value", "…")) for part in _constants(argument))
    text = argument.value if isinstance(argument, ast.Constant) else ""
    return text if isinstance(text, str) and " " in text else ""


def _constants(text: ast.JoinedStr) -> Iterator[ast.Constant]:
    for part in text.values:
        yield part if isinstance(part, ast.Constant) else ast.Constant("…")


def all_messages() -> list[str]:
    sources = [path.read_text() for path in Path(distributor.__file__).parent.rglob("*.py")]
    sources = [source for source in sources if any(f"{name}(" in source for name in FUNCTIONS)]
    found = {message for source in sources for message in messages_in(source)}
    return sorted(message for message in found if len(message.replace("…", "")) > 5)


def test_messages_are_found() -> None:
    source = "notify(f'Started {ranks} ranks')\nself.warn('one two')\nwarn('word')\nprint('no it')"
    assert list(messages_in(source)) == ["Started … ranks", "one two"]
    assert len(all_messages()) > 35


@pytest.mark.parametrize("message", all_messages())
def test_every_message_is_documented(message: str) -> None:
    page = PAGE.read_text()
    assert f"`{message}`" in page or f"`{message.removesuffix('.')}`" in page
