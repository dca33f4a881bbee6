"""HTML for notebooks: tables, and text with links."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping

from distributor.core.text import printable

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
