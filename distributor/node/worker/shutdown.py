"""Steps that remain when a rank's program has returned, before its value counts."""

from __future__ import annotations

from collections.abc import Callable

_steps: list[Callable[[], object]] = []


def before_the_end(step: Callable[[], object]) -> None:
    """Have this done once the program has returned; what it raises is the rank's failure."""
    _steps.append(step)


def finish() -> None:
    """Do all of it, in the order in which it was asked for."""
    while _steps:
        _steps.pop(0)()
