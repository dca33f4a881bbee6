"""The Python stacks of ranks as text, with a summary of where each rank is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from distributor.core.text import listed

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^.*[Tt]hread.*\(most recent call first\):$", re.MULTILINE)
_SENT = "/distributor-modules-"
"""Part of the folders with the user's modules on nodes."""
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<(?:frozen |string>)"
    r"|/distributor/(?:_compat|core|data|launch|node|ray|serialization|tracking|train|wire)/"
)
"""Files that are not the user's: installed packages, the standard library, this package."""
_LAUNCHERS = re.compile(
    r'(?<=\n)(?:  File "(?:[^"\n]*/distributor/node/[^"\n]*|<string>|<frozen runpy>)", '
    r".*(?:\n|\Z))+\Z"
)
"""The oldest frames of a rank, which have called the user's program."""
_INTERNAL = re.compile(r"^_|^wrapper$")
"""Functions that are not what the user called, such as those of torch's decorators."""


def append_stacks(text: str, stacks: Mapping[int, str]) -> str:
    """Append stacks to a text, after a line for each place at which ranks are.

    Parameters
    ----------
    text : str
        The text.
    stacks : mapping of int to str
        The threads of each rank, as ``faulthandler`` writes them. Ranks with the same stack share
        one.
    """
    if not stacks:
        return text
    shown = {rank: _without_launcher(stack) for rank, stack in stacks.items()}
    parts = "".join(f"{ranks}:\n{stack}\n" for stack, ranks in _grouped(shown).items())
    places = _grouped({rank: _place(stack) for rank, stack in stacks.items()})
    summary = "".join(f"\n  {ranks}: {place}" for place, ranks in places.items() if place)
    if summary:
        text = f"{text}\n\nWhere the ranks are:{summary}"
    return f"{text}\n\nStacks of the ranks, the most recent call first:\n{parts}".rstrip("\n")


def _grouped(text_by_rank: Mapping[int, str]) -> dict[str, str]:
    """Return the ranks that have each text, as text."""
    ranks_with: dict[str, list[int]] = {}
    for rank, text in sorted(text_by_rank.items()):
        ranks_with.setdefault(text, []).append(rank)
    return {text: listed("rank", ranks) for text, ranks in ranks_with.items()}


def _without_launcher(stack: str) -> str:
    """Omit the oldest frames if they are this package's, unless there are no others."""
    shorter = _LAUNCHERS.sub("", stack)
    return shorter.rstrip("\n") if _FRAME.search(_THREAD.split(shorter)[-1]) else stack


def _place(stack: str) -> str:
    """Return the user's line at which a rank's main thread is, and what it called there.

    Empty if the stack has no line of the user's.
    """
    main_thread = _THREAD.split(stack)[-1]  # faulthandler writes the oldest thread last
    called = ""
    for file, line, function in _FRAME.findall(main_thread):
        if _SENT in file or not _LIBRARY.search(file):
            place = f"{function} ({PurePath(file).name}:{line})"
            return f"in {called}, called by {place}" if called else f"in {place}"
        if not _INTERNAL.search(function):
            called = function
    return ""
