"""The settings of a run that its nodes and ranks use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Settings of a run for its nodes and ranks, under the names that they have in `Settings`.

    The driver enforces `timeout`, or a node itself if it has no link to the driver.
    """

    start_timeout: float = 600.0
    timeout: float | None = None
    warm: bool = False
    preload: tuple[str, ...] = ()
    numa_binding: bool = False

    @staticmethod
    def of(source: object) -> NodeSettings:
        """Return these settings among all of a run, or of a node's share."""
        values = {each.name: getattr(source, each.name) for each in fields(NodeSettings)}
        return NodeSettings(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    """Replace a list by a tuple; nodes may lack the class of a user's sequence."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
