"""The outcomes of an attempt: what arrived over the links, and what its launcher returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from distributor.control.run import NodesEnded
from distributor.core.resources import free_memory
from distributor.errors import NodeLost
from distributor.serialization.oob_pickle import anonymous_file
from distributor.serialization.outcome import Failure, Outcome, Value
from distributor.wire.messages import ValuePart, ValueReceived, ValueRefused, ValueStart


@dataclass
class _Transfer:
    file: BinaryIO
    missing: int


class Outcomes:
    """The failures and values of an attempt's ranks.

    Attributes
    ----------
    failures : list of Failure
        The failures that nodes reported, in the order in which they were received.
    values : dict of int to Value
        The complete values that came over links, by rank.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.failures: list[Failure] = []
        self.values: dict[int, Value] = {}
        self._transfers: dict[int, _Transfer] = {}

    @property
    def has_cause(self) -> bool:
        """Whether a failure can be the cause of the others."""
        return not all(failure.collateral for failure in self.failures)

    @property
    def all_failed(self) -> bool:
        """Whether every rank has failed, so that no further failure can follow."""
        return len({failure.origin.rank for failure in self.failures}) == self._num_ranks

    def start_value(self, message: ValueStart) -> ValueRefused | None:
        """Reserve memory for a value; return a refusal for its node if there is too little."""
        room = free_memory() - sum(transfer.missing for transfer in self._transfers.values())
        if message.size > room:
            return ValueRefused(message.rank, max(room, 0))
        self._transfers[message.rank] = _Transfer(anonymous_file(), message.size)
        return None

    def add_part(self, part: ValuePart) -> ValueReceived | None:
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

    def discard_values(self) -> None:
        for value in self.values.values():
            value.file.close()

    def discard_incomplete(self) -> None:
        for transfer in self._transfers.values():
            transfer.file.close()

    def of(self, ending: NodesEnded, first_lost: str) -> list[Outcome]:
        """Return the outcomes of an attempt whose nodes have ended."""
        if ending.error is None:
            return [*self.failures, *{**ending.values(), **self.values}.values()]
        reported = {failure.origin.rank for failure in self.failures}
        others = (each for each in ending.failures if each.origin.rank not in reported)
        failures = [*self.failures, *others]
        if all(failure.collateral for failure in failures):
            _raise_cause(ending, failures, first_lost)
        return [*failures, *self.values.values()]


def _raise_cause(ending: NodesEnded, failures: list[Failure], first_lost: str) -> None:
    """Raise what the launcher knows of ranks that reported nothing but lost connections."""
    assert ending.error is not None
    explained = ending.timed_out or ending.explain(ending.error, first_lost)
    if explained is ending.error:
        raise explained
    if ending.timed_out:
        raise ending.timed_out from ending.error
    if not failures or isinstance(explained, NodeLost):
        raise explained from ending.error
