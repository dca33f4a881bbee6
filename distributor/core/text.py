"""Counts and lists in messages, with nouns that agree with them."""

from __future__ import annotations

from collections.abc import Collection


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun, such as "1 rank" or "2 ranks".

    Parameters
    ----------
    number : int
        How many there are.
    noun : str
        What there is one of.
    plural : str, optional
        The noun's plural; by default the noun and an "s".
    """
    return f"{number} {_agreeing(number, noun, plural)}"


def listed(noun: str, items: Collection[object], plural: str | None = None) -> str:
    """Return a noun and what it names, such as "rank 3" or "ranks 0, 3"."""
    return f"{_agreeing(len(items), noun, plural)} {', '.join(map(str, items))}"


def _agreeing(number: int, noun: str, plural: str | None) -> str:
    return noun if number == 1 else plural or f"{noun}s"
