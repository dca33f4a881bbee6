"""The number of the step that a rank's program has reached, sent with its failure."""

from __future__ import annotations

_step = 0


def note(step: int) -> None:
    """Note how many steps the program has behind it, those of earlier attempts too."""
    global _step
    _step = step


def step() -> int:
    """Give what was noted last; 0 where nothing was."""
    return _step
