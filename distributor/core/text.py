"""Texts of messages: what is no valid Unicode, and counts and lists with nouns that agree."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator


def printable(text: str) -> str:
    """Return a text with escapes for what is no valid Unicode, as file names may contain."""
    return text.encode(errors="backslashreplace").decode()


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f]")


def plain(text: str) -> str:
    """Return a text without a terminal's control sequences."""
    return _CONTROL.sub("", text)


def duration(seconds: float) -> str:
    """Return seconds in the units that people use, such as "3.2 s" or "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message: a server's may be a page of HTML."""
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


def is_unicode(text: str) -> bool:
    return printable(text) == text


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun, such as "1 rank" or "2 ranks"."""
    return f"{number} {_agreeing(number, noun, plural)}"


def listed(noun: str, items: Collection[object], plural: str | None = None) -> str:
    """Return a noun and what it names, such as "rank 3", "ranks 0, 3" or "ranks 0 to 7, 9"."""
    return f"{_agreeing(len(items), noun, plural)} {', '.join(_as_ranges(items))}"


def _as_ranges(items: Iterable[object]) -> Iterator[str]:
    for _, numbered in itertools.groupby(enumerate(items), key=_first_of_range):
        found = [str(item) for _, item in numbered]
        yield from [f"{found[0]} to {found[-1]}"] if len(found) > 2 else found


def _first_of_range(numbered: tuple[int, object]) -> object:
    """Return what consecutive numbers have in common, and nothing else has."""
    number, item = numbered
    return item - number if isinstance(item, int) else numbered


def _agreeing(number: int, noun: str, plural: str | None) -> str:
    return noun if number == 1 else plural or f"{noun}s"
