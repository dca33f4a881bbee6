"""Who is a member of an attempt whose survivors go on when ranks are lost.

A rank is a member from its start, or once a replacement has joined, until it is lost or has
finished. Each change has a number, its generation, which the ranks take from here: ranks that
counted for themselves could stay apart for ever.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from distributor.core.text import counted, listed
from distributor.rank.membership import Change, Members
from distributor.rank.messages import MemberState
from distributor.serialization.outcome import Failure

MAX_UNFORMED = 5
"""Groups that do not form, one after the other, until all ranks restart."""


class Membership:
    """The members of an attempt.

    Parameters
    ----------
    num_ranks : int
        How many ranks there are at the start.
    least : int
        The fewest ranks that may go on.
    keeps_all : bool
        Whether the values of all ranks are wanted, or that of rank 0 alone.

    Attributes
    ----------
    current : Members
        The members, by the numbers that they had at the start, or that those had whom they replace.
    finished : set of int
        Those whose program has returned.
    store : tuple of str and int
        The address of the store in which the next generation finds each other.
    refusal : str or None
        Why the ranks cannot go on without a restart.
    pending : list of Failure
        The failures since the last group that has formed.
    """

    def __init__(self, num_ranks: int, least: int = 1, keeps_all: bool = True) -> None:
        self._least, self._keeps_all = least, keeps_all
        self.store = "", 0
        self._since = dict.fromkeys(range(num_ranks), 0)
        self.current = Members(0, tuple(range(num_ranks)), since=tuple(self._since.items()))
        self.finished: set[int] = set()
        self._has_value = False  # of a rank that was rank 0 at its end
        self.refusal: str | None = None
        self.pending: list[Failure] = []
        self._able: set[int] = set()
        self._formed = set(range(num_ranks))  # of the members, those that are in the group
        self._ready: set[int] = set()  # to join
        # Members that have no state until their group has formed, and its generation.
        self._joining: dict[int, int] = {}
        self._num_unformed = 0
        self._seen: set[tuple[str, int]] = set()

    @property
    def numbers(self) -> list[int]:
        """The numbers of members and of those that have finished; the first returns the value."""
        return sorted({*self.current.numbers, *self.finished})

    def reason_to_restart(self, failures: Sequence[Failure]) -> str | None:
        """Note failures of one event; return why the others cannot go on, if they cannot."""
        keys = {(each.summary, each.step) for each in failures if each.step is not None}
        repeats, self._seen = bool(keys & self._seen), self._seen | keys
        lost, members = {each.origin.rank for each in failures}, set(self.current.numbers)
        if self.refusal is not None:
            return self.refusal
        if any(each.collateral for each in failures):
            return "a collective of the program itself has failed"
        if repeats:
            return "another rank has failed at the same step in the same way"
        has_value = {*self.numbers[:1], *(self.finished if self._keeps_all else ())}
        if self.finished and lost & has_value:
            return "some ranks have finished, and a value is lost"
        if not lost & members:  # they have not joined yet
            return None
        if waiting := sorted(members - self._able):
            verb = "has" if len(waiting) == 1 else "have"
            return f"{listed('rank', waiting)} {verb} not completed a step yet"
        if not members - self._joining.keys() - lost and not self.finished:
            return "no other rank is left"
        if len((members | self.finished) - lost) < self._least:
            return f"num_processes asks for at least {counted(self._least, 'rank')}"
        return None

    def lose(self, failures: Sequence[Failure]) -> Members:
        """Go on without ranks; return the members, which are the same if none had joined."""
        lost = {each.origin.rank for each in failures}
        self._ready -= lost
        if lost & {*self.current.numbers, *self.finished}:
            self.finished -= lost
            self.pending += failures
            self._able -= lost
            self._lose(lost)
        return self.current

    def give_up(self, ranks: Collection[int]) -> bool:
        """Note that ranks do not join; return False, and do nothing, if one of them has."""
        if not {*ranks}.isdisjoint({*self.current.numbers, *self.finished}):
            return False
        self._ready -= {*ranks}
        return True

    def note(self, rank: int, state: MemberState) -> Members | None:
        """Note what a rank reports; return the members if they have changed."""
        before = self.current
        if state.state == "able":
            self._able.add(rank)
        elif state.state == "unable":
            self.refusal = self.refusal or state.reason
        elif state.state == "finished" and rank in {*before.numbers, *self._ready}:
            self._has_value = self._has_value or state.rank == 0
            self._finish(rank)
        elif state.state == "ready":
            self._able.add(rank)
            self._ready.add(rank)
        elif state.generation == before.generation and rank in before.numbers:
            self._note_group(rank, state.state)
        if state.state == "formed" and self._joining.get(rank, math.inf) <= state.generation:
            del self._joining[rank]  # also if the members have changed since
        self._grow()
        return None if self.current is before else self.current

    def _note_group(self, rank: int, state: str) -> None:
        if state == "formed":
            self._formed.add(rank)
            if self.has_formed:
                self.pending, self._num_unformed = [], 0
        elif state == "unformed" or (state == "waiting" and self.finished):
            self._num_unformed += 1
            if self._num_unformed > MAX_UNFORMED:
                self.refusal = "they could not form a group"
            self._lose(set())

    @property
    def reason_of_end(self) -> str | None:
        """Why the ranks have to start again now, if they have to."""
        if self.current.change == "end":
            return None if self._has_value else "they have finished, and none of them was rank 0"
        return None if self.has_formed else self.refusal

    @property
    def has_ended(self) -> bool:
        """Whether a rank has finished, so that none can join any more."""
        return self.current.change == "end" or bool(self.finished)

    @property
    def has_formed(self) -> bool:
        """Whether all members are in the group of this generation, or have finished."""
        return self.current.change == "end" or self._formed >= set(self.current.numbers)

    def _lose(self, lost: set[int]) -> None:
        """Have the others form a group at once; some may do so between two steps.

        Ranks join later, as they need a step of all.
        """
        before = set(self.current.numbers)
        left = self._remaining(before - lost)
        self._ready |= before - lost - left - self.finished
        for rank in lost | self._ready:
            self._since.pop(rank, None)
        if left:
            self._change(left, "loss")
        else:
            self._change(self.finished, "end")

    def _finish(self, rank: int) -> None:
        self.finished.add(rank)
        self._ready.discard(rank)
        numbers, change = set(self.current.numbers), self.current.change
        if change == "end":
            return
        if not self._remaining(numbers):
            self._change(self.finished, "end")
        elif not self._formed:  # nor will it
            self._change(numbers - self.finished, change)

    def _remaining(self, numbers: set[int]) -> set[int]:
        """Return those that have not finished, and have joined.

        If one has formed the group, all have: their reports may arrive later.
        """
        return numbers - self.finished - (set() if self._formed else self._joining.keys())

    def _grow(self) -> None:
        """Have ranks join that are ready, once the group has formed: a step of all is agreed on."""
        left = set(self.current.numbers) - self.finished
        joining = left and self._ready - left
        if joining and self.has_formed and not self.refusal and self.current.change != "end":
            self._change(left | joining, "growth")

    def _change(self, numbers: set[int], change: Change) -> None:
        generation = self.current.generation + 1
        joining = self._joining | dict.fromkeys(numbers - {*self.current.numbers}, generation)
        self._joining = {rank: joining[rank] for rank in joining.keys() & numbers}
        for rank in numbers:
            self._since.setdefault(rank, generation)
        since = tuple(sorted(self._since.items()))
        self.current = Members(generation, tuple(sorted(numbers)), change, self.store, since)
        self._formed = set()
        self._ready -= numbers
