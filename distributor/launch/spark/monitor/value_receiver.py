"""Receives values over the link if the driver has memory for them, and refuses them if not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from distributor.core.resources import free_memory
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Value
from distributor.wire.messages import ValuePart, ValueReceived, ValueRefused, ValueStart


@dataclass(frozen=True)
class _Coming:
    file: BinaryIO
    size: int

    @property
    def missing(self) -> int:
        return self.size - self.file.tell()


class ValueReceiver:
    """The values of a run's ranks on their way.

    Attributes
    ----------
    values : dict of int to Value
        Those that are here, by rank.
    """

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self._coming: dict[int, _Coming] = {}

    def start(self, message: ValueStart) -> ValueRefused | None:
        """Make room for a value; give the answer for its node where there is none."""
        room = free_memory() - sum(coming.missing for coming in self._coming.values())
        if message.size > room:
            return ValueRefused(message.rank, max(room, 0))
        self._coming[message.rank] = _Coming(anonymous_file(), message.size)
        return None

    def take(self, part: ValuePart) -> ValueReceived | None:
        """Take a piece of a value; give the answer for its node where it was the last."""
        coming = self._coming.get(part.rank)
        if coming is None:
            return None  # sent before its node had read that it is refused
        coming.file.write(part.data)
        if coming.missing:
            return None
        self.values[part.rank] = Value(part.rank, self._coming.pop(part.rank).file)
        return ValueReceived(part.rank)

    def close(self) -> None:
        """Give up what is not here."""
        for coming in self._coming.values():
            coming.file.close()
