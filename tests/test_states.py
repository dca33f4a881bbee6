"""State machines: what changes a state, and that ARCHITECTURE.md shows the tables of the code."""

from __future__ import annotations

import enum

import pytest
from support.states import DOCUMENT, MACHINES, unreachable, with_tables

from distributor.core.states import StateMachine, Table


class Light(enum.Enum):
    RED = "red"
    GREEN = "green"


class Clock(enum.Enum):
    TICK = "tick"
    HIT = "hit"


def switch(log: list[str]) -> None:
    """Switch."""
    log.append("switched")


def test_a_state_changes_by_the_table_alone() -> None:
    log: list[str] = []
    table: Table[Light] = {(Light.RED, Clock.TICK): (Light.GREEN, switch)}
    machine = StateMachine(table, Light.RED, log)
    assert not machine.fire(Clock.HIT), "a state without this event ignores it"
    assert machine.fire(Clock.TICK)
    assert machine.state is Light.GREEN
    assert log == ["switched"]
    assert unreachable(table, Light.GREEN) == {Light.RED}


@pytest.mark.parametrize("name", MACHINES)
def test_each_state_can_be_reached(name: str) -> None:
    assert unreachable(*MACHINES[name]) == set()


def test_the_document_shows_the_tables_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert all(f"<!-- states: {name} -->" in text for name in MACHINES)
    assert text == with_tables(text), "PYTHONPATH=tests python -m support.states rewrites them"
