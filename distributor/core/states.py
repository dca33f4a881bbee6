"""State machines whose transitions are data, so that they can be checked and documented."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

StateT = TypeVar("StateT", bound=enum.Enum)
Event: TypeAlias = enum.Enum | type
"""An enum member, or the class of a message."""
Table: TypeAlias = Mapping[tuple[StateT, Event], tuple[StateT, str]]
"""The transitions: ``(state, event)`` maps to the next state and what is done, in words."""


class StateMachine(Generic[StateT]):
    """The current state, which changes by a table alone."""

    def __init__(self, table: Table[StateT], initial: StateT) -> None:
        self._table = table
        self.state = initial

    def fire(self, event: Event) -> bool:
        """Change to the next state; ignore an event for which the state has no transition.

        Processes and deadlines race, so an event may come when it no longer matters. A caller acts
        on an event only if this returns True.
        """
        transition = self._table.get((self.state, event))
        if transition is None:
            return False
        self.state = transition[0]
        return True


class _Row(NamedTuple):
    event: str
    next_state: str
    action: str


def render(table: Table[StateT]) -> str:
    """Return a Markdown table with a row for each event, next state and action."""
    rows: dict[_Row, list[str]] = {}
    for (state, event), (next_state, action) in table.items():
        row = _Row(_name(event), _name(next_state), action)
        rows.setdefault(row, []).append(f"`{_name(state)}`")
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


def _name(event: Event) -> str:
    return event.name if isinstance(event, enum.Enum) else event.__name__
