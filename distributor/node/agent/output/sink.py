"""The interface through which ranks' output reaches the console, files or the driver."""

from __future__ import annotations

from typing import Protocol

from distributor.wire.messages import Source


class Sink(Protocol):
    """Receives what ranks print and report."""

    def write(self, rank: int, source: Source, data: bytes) -> None:
        """Take bytes that a rank printed or reported."""

    def has_room(self) -> bool:
        """Return whether the sink can take more now; if not, the bytes stay in the rank's file."""
