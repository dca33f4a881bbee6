"""State machines whose transitions are data, so that they can be checked and documented."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

StateT = TypeVar("StateT", bound=enum.Enum)
Table: TypeAlias = Mapping[tuple[StateT, enum.Enum], tuple[StateT, Callable[..., object]]]
"""The transitions: ``(state, event)`` maps to the next state and the action, a function."""


class StateMachine(Generic[StateT]):
    """The current state, which changes by a table alone. Actions get `owner`."""

    def __init__(self, table: Table[StateT], initial: StateT, owner: Any = None) -> None:
        self._table = table
        self._owner = owner
        self.state = initial

    def fire(self, event: enum.Enum) -> bool:
        """Change to the next state and act; return False for an event that the state ignores."""
        # Processes and deadlines race, so an event may come when it no longer matters.
        transition = self._table.get((self.state, event))
        if transition is None:
            return False
        self.state, action = transition
        action(self._owner)
        return True
