"""Receives values over the link if the driver has memory for them, and refuses them if not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from distributor.core.resources import free_memory
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Value
from distributor.wire.messages import ValuePart, ValueReceived, ValueRefused, ValueStart


@dataclass
class _Transfer:
    file: BinaryIO
    missing: int


class ValueReceiver:
    """Puts the values of a run's ranks together from the parts that nodes send.

    Attributes
    ----------
    values : dict of int to Value
        The complete values, by rank.
    """

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self._transfers: dict[int, _Transfer] = {}

    def start(self, message: ValueStart) -> ValueRefused | None:
        """Reserve memory for a value; return a refusal for its node if there is too little."""
        room = free_memory() - sum(transfer.missing for transfer in self._transfers.values())
        if message.size > room:
            return ValueRefused(message.rank, max(room, 0))
        self._transfers[message.rank] = _Transfer(anonymous_file(), message.size)
        return None

    def take(self, part: ValuePart) -> ValueReceived | None:
        """Write a part of a value; return a receipt for its node after the last part."""
        transfer = self._transfers.get(part.rank)
        if transfer is None:
            return None  # sent before its node had read the refusal
        transfer.file.write(part.data)
        transfer.missing -= len(part.data)
        if transfer.missing:
            return None
        self.values[part.rank] = Value(part.rank, self._transfers.pop(part.rank).file)
        return ValueReceived(part.rank)

    def close(self) -> None:
        """Discard incomplete values."""
        for transfer in self._transfers.values():
            transfer.file.close()
