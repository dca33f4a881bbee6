"""Texts of messages: what is no valid Unicode, and counts and lists with nouns that agree."""

from __future__ import annotations

import html
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


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


_URL = re.compile(r"https?://[^\s<>\"']+")
# Of JupyterLab's themes, readable on both; the second color is for other front ends.
RED = "var(--jp-error-color1, #c62828)"
GREEN = "var(--jp-success-color0, #2e7d32)"
BLUE = "var(--jp-brand-color1, #1565c0)"
GRAY = "var(--jp-content-font-color2, currentColor)"
_LEFT = 'style="text-align: left"'


def escaped(text: str) -> str:
    """Return HTML that shows a text."""
    return html.escape(printable(text))


def linked(text: str) -> str:
    """Return HTML that shows a text, in which addresses are links."""
    parts, end = [], 0
    for found in _URL.finditer(text):
        address = escaped(found[0])
        parts += [escaped(text[end : found.start()]), f'<a href="{address}">{address}</a>']
        end = found.end()
    return "".join([*parts, escaped(text[end:])])


def table(rows: Iterable[Iterable[str]]) -> str:
    """Return a table of HTML cells; the first cell of a row is its heading."""
    lines = (
        f"<th {_LEFT}>{name}</th>" + "".join(f"<td {_LEFT}>{cell}</td>" for cell in cells)
        for name, *cells in rows
    )
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def table_of(title: str, rows: Mapping[str, object]) -> str:
    """Return a table of names and values, with a title.

    Parameters
    ----------
    title : str
        What the rows describe.
    rows : mapping of str to object
        The values, by their names; a str is shown as it is, others as their ``repr``.
    """
    values = {
        name: value if isinstance(value, str) else repr(value) for name, value in rows.items()
    }
    cells = ([escaped(name), escaped(value)] for name, value in values.items())
    return f"<strong>{escaped(title)}</strong>{table(cells)}"


# Variables that hold secrets, by name; Spark's own ``spark.redaction.regex`` is much the same.
NAMES = re.compile(
    r"secret|passw|token(?!iz)|credential|api_?key|access_?key|private_?key", re.IGNORECASE
)
LEAST = 6  # characters that a value needs to be replaced: shorter values occur everywhere
MASK = "*********(redacted)"  # the replacement, as in Spark


class Redaction:
    """Replaces the secrets of a run in the output of its ranks."""

    def __init__(self, env: Mapping[str, str]) -> None:
        # Longer ones first: one may be a prefix of another.
        self._secrets = sorted(set(_secrets_in(env)), key=len, reverse=True)
        pattern = "|".join(map(re.escape, self._secrets))
        self._in_text = re.compile(pattern) if pattern else None
        self._encoded = [os.fsencode(secret) for secret in self._secrets]
        self._in_bytes = re.compile(os.fsencode(pattern)) if pattern else None

    def of_text(self, text: str) -> str:
        return self._in_text.sub(MASK, text) if self._in_text else text

    def of_stream(self, data: bytes, last: bool) -> tuple[bytes, int]:
        """Return the next part of a stream without secrets, and how many bytes of `data` it is.

        The rest may be the beginning of a secret, unless the data is the stream's `last`.
        """
        if self._in_bytes is None:
            return data, len(data)
        length = len(data) if last else self._settled(self._in_bytes, data)
        return self._in_bytes.sub(MASK.encode(), data[:length]), length

    def _settled(self, secrets: re.Pattern[bytes], data: bytes) -> int:
        """Return how many bytes can be shown whatever follows."""
        begun = len(data) - max(_overlap(data, secret) for secret in self._encoded)
        whole = (found.span() for found in secrets.finditer(data))
        # A complete match that overlaps a possible beginning may be part of a longer secret.
        return min([begun, *(start for start, end in whole if end > begun)])


def _secrets_in(env: Mapping[str, str]) -> Iterator[str]:
    for name, value in env.items():
        if NAMES.search(name):
            # A key of several lines may be printed line by line, or with its newlines escaped.
            yield from (line for line in value.split("\n") if len(line) >= LEAST)


def _overlap(data: bytes, secret: bytes) -> int:
    """Return the length of the longest suffix of `data` that is a proper prefix of `secret`."""
    at = max(0, len(data) - len(secret) + 1)
    while (at := data.find(secret[:LEAST], at)) >= 0:  # comparing all suffixes takes seconds
        if memoryview(data)[at:] == memoryview(secret)[: len(data) - at]:
            return len(data) - at
        at += 1
    longest = min(len(data), LEAST - 1)
    return next((n for n in range(longest, 0, -1) if data.endswith(secret[:n])), 0)
