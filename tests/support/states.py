"""The state machines that ARCHITECTURE.md documents.

Run as ``PYTHONPATH=tests python -m support.states`` to rewrite their tables in the document.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import distributor
from distributor.control import controller
from distributor.core.states import StateT, Table
from distributor.node import lifecycle

DOCUMENT = Path(distributor.__file__).resolve().parent.parent / "ARCHITECTURE.md"


class Documented(NamedTuple):
    """A table, and the state in which its machine begins."""

    table: Table[Any]
    initial: Any


MACHINES: dict[str, Documented] = {
    "run": Documented(controller.TRANSITIONS, controller.RunState.WAITING),
    "node": Documented(lifecycle.TRANSITIONS, lifecycle.NodeState.STARTING),
}
"""By the name in the marker before the table: ``<!-- states: NAME -->``, up to ``<!-- end -->``."""


class _Row(NamedTuple):
    event: str
    next_state: str
    action: str


def render(table: Table[StateT]) -> str:
    """Return a Markdown table with a row for each event, next state and action's docstring."""
    rows: dict[_Row, list[str]] = {}
    for (state, event), (next_state, action) in table.items():
        text = " ".join((inspect.getdoc(action) or "").split())
        row = _Row(event.name, next_state.name, text)
        rows.setdefault(row, []).append(f"`{state.name}`")
    lines = [
        f"| {', '.join(states)} | `{row.event}` | `{row.next_state}` | {row.action} |"
        for row, states in rows.items()
    ]
    return "\n".join(
        ["| state | event | next state | action |", "| --- | --- | --- | --- |", *lines]
    )


def unreachable(table: Table[StateT], initial: StateT) -> set[StateT]:
    """Return the states of the table's enum to which no transitions lead from the first state."""
    reached, found = {initial}, {initial}
    while found:
        found = {to for (state, _), (to, _) in table.items() if state in found} - reached
        reached |= found
    return set(type(initial)) - reached


_SECTION = re.compile(r"(?<=<!-- states: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def documented_tables(text: str) -> dict[str, str]:
    """Return what a document has between the markers, by name."""
    return {
        found[1]: found[0].removeprefix(f"{found[1]}{found[2]}").strip()
        for found in _SECTION.finditer(text)
    }


def with_tables(text: str) -> str:
    """Return the document with the tables as the code has them."""

    def section(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}\n{render(MACHINES[found[1]].table)}\n\n"

    return _SECTION.sub(section, text)


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
