"""HTML for objects that are the value of a notebook's cell."""

from __future__ import annotations

import html
from collections.abc import Mapping

from distributor.core.text import printable


def table_of(title: str, rows: Mapping[str, object]) -> str:
    """Return a table of names and values, with a title.

    Parameters
    ----------
    title : str
        What the rows describe.
    rows : mapping of str to object
        The values, by their names; a str is shown as it is, others as their ``repr``.
    """
    lines = "".join(
        f'<tr><th style="text-align: left">{html.escape(name)}</th>'
        f'<td style="text-align: left">{html.escape(_text(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<strong>{html.escape(title)}</strong><table>{lines}</table>"


def _text(value: object) -> str:
    return printable(value if isinstance(value, str) else repr(value))
