"""State machines whose transitions are data, so that they can be checked and documented."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeAlias, TypeVar

StateT = TypeVar("StateT", bound=enum.Enum)
Event: TypeAlias = enum.Enum | type  # an enum member, or the class of a message
# The transitions: ``(state, event)`` maps to the next state and what is done, in words.
Table: TypeAlias = Mapping[tuple[StateT, Event], tuple[StateT, str]]


class StateMachine(Generic[StateT]):
    """The current state, which changes by a table alone."""

    def __init__(self, table: Table[StateT], initial: StateT) -> None:
        self._table = table
        self.state = initial

    def fire(self, event: Event) -> bool:
        """Change to the next state; return False for an event that the state ignores."""
        # Processes and deadlines race, so an event may come when it no longer matters.
        transition = self._table.get((self.state, event))
        if transition is None:
            return False
        self.state = transition[0]
        return True
