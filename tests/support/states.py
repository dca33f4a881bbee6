"""The state machines that ARCHITECTURE.md documents.

Run as ``PYTHONPATH=tests python -m support.states`` to rewrite their tables in the document.
"""

from __future__ import annotations

import inspect
from typing import Any

from distributor.control import controller
from distributor.core.states import StateT, Table
from distributor.node import node
from support.pages import ROOT, fill_section

DOCUMENT = ROOT / "ARCHITECTURE.md"
MACHINES: dict[str, tuple[Table[Any], Any]] = {
    "run": (controller.TRANSITIONS, controller.RunState.WAITING),
    "node": (node.TRANSITIONS, node.NodeState.STARTING),
}
"""A table and its first state, by the name in the marker ``<!-- states: NAME -->``."""


def render(table: Table[StateT]) -> str:
    """Return a Markdown table with a row for each event, next state and action's docstring."""
    rows: dict[str, list[str]] = {}
    for (state, event), (next_state, action) in table.items():
        text = " ".join((inspect.getdoc(action) or "").split())
        row = f"`{event.name}` | `{next_state.name}` | {text}"
        rows.setdefault(row, []).append(f"`{state.name}`")
    lines = [f"| {', '.join(states)} | {row} |" for row, states in rows.items()]
    head = ["| state | event | next state | action |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *lines])


def unreachable(table: Table[StateT], initial: StateT) -> set[StateT]:
    """Return the states of the table's enum to which no transitions lead from the first state."""
    reached, found = {initial}, {initial}
    while found:
        found = {to for (state, _), (to, _) in table.items() if state in found} - reached
        reached |= found
    return set(type(initial)) - reached


def with_tables(text: str) -> str:
    """Return the document with the tables as the code has them."""
    for name, (table, _) in MACHINES.items():
        text = fill_section(text, f"states: {name}", render(table))
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
