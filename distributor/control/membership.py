"""Who is a member of an attempt whose survivors go on when ranks are lost.

A rank is a member from its start, or once a replacement has joined, until it is lost or has
finished. Each change has a number, its generation, which the ranks take from here: ranks that
counted for themselves could stay apart for ever.
"""

from __future__ import annotations

from distributor.core.text import listed
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

    Attributes
    ----------
    current : Members
        The members, by the numbers that they had at the start, or that those had whom they replace.
    finished : set of int
        Those whose program has returned.
    refusal : str or None
        Why the ranks cannot go on without a restart.
    pending : list of Failure
        The failures since the last group that has formed.
    """

    def __init__(self, num_ranks: int) -> None:
        self.current = Members(0, tuple(range(num_ranks)))
        self.finished: set[int] = set()
        self.refusal: str | None = None
        self.pending: list[Failure] = []
        self._able: set[int] = set()
        self._formed = set(range(num_ranks))  # of the members, those that are in the group
        self._ready: set[int] = set()  # to join
        self._joining: set[int] = set()  # members that have no state until their group has formed
        self._num_unformed = 0
        self._seen: set[tuple[str, int]] = set()

    @property
    def numbers(self) -> list[int]:
        """The numbers of members and of those that have finished; the first returns the value."""
        return sorted({*self.current.numbers, *self.finished})

    def reason_to_restart(self, failure: Failure) -> str | None:
        """Note a failure; return why the others cannot go on without this rank, if they cannot."""
        key = None if failure.step is None else (failure.summary, failure.step)
        repeats, rank = key in self._seen, failure.origin.rank
        if key is not None:
            self._seen.add(key)
        if self.refusal is not None:
            return self.refusal
        if failure.collateral:
            return "a collective of the program itself has failed"
        if repeats:
            return "another rank has failed at the same step in the same way"
        if rank not in self.current.numbers:  # it has not joined yet
            return None
        if waiting := sorted(set(self.current.numbers) - self._able):
            verb = "has" if len(waiting) == 1 else "have"
            return f"{listed('rank', waiting)} {verb} not completed a step yet"
        if not set(self.current.numbers) - self._joining - {rank} and not self.finished:
            return "no other rank is left"
        return None

    def lose(self, failure: Failure) -> Members:
        """Go on without a rank; return the members, which are the same if it had not joined."""
        rank = failure.origin.rank
        self._ready.discard(rank)
        if rank in self.current.numbers:
            self.pending.append(failure)
            self._able.discard(rank)
            self._lose({rank})
        return self.current

    def note(self, rank: int, state: MemberState) -> Members | None:
        """Note what a rank reports; return the members if they have changed."""
        before = self.current
        if state.state == "able":
            self._able.add(rank)
        elif state.state == "unable":
            self.refusal = self.refusal or state.reason
        elif state.state == "finished":
            self._finish(rank)
        elif state.state == "ready":
            self._able.add(rank)
            self._ready.add(rank)
        elif state.generation == before.generation:
            self._note_group(rank, state.state)
        self._grow()
        return None if self.current is before else self.current

    def _note_group(self, rank: int, state: str) -> None:
        if state == "formed":
            self._formed.add(rank)
            self._joining.discard(rank)
            if self.has_formed:
                self.pending, self._num_unformed = [], 0
        elif state == "unformed" or (state == "waiting" and self.finished):
            self._num_unformed += 1
            if self._num_unformed > MAX_UNFORMED:
                self.refusal = "they could not form a group"
            self._lose(set())

    @property
    def has_formed(self) -> bool:
        """Whether all members are in the group of this generation, or have finished."""
        return self.current.change == "end" or self._formed >= set(self.current.numbers)

    def _lose(self, lost: set[int]) -> None:
        """Have the others form a group at once, with those that are ready to join."""
        left = set(self.current.numbers) - lost - self.finished
        if self._remaining(left):
            self._change(left | self._ready, "loss")
        else:
            self._change(self.finished, "end")

    def _finish(self, rank: int) -> None:
        self.finished.add(rank)
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
        return numbers - self.finished - (set() if self._formed else self._joining)

    def _grow(self) -> None:
        """Have ranks join that are ready, once the group has formed: a step of all is agreed on."""
        left = set(self.current.numbers) - self.finished
        joining = self._ready - left
        if left and joining and self.has_formed and self.current.change != "end":
            self._change(left | joining, "growth")

    def _change(self, numbers: set[int], change: Change) -> None:
        self._joining = (self._joining | (numbers - set(self.current.numbers))) & numbers
        self.current = Members(self.current.generation + 1, tuple(sorted(numbers)), change)
        self._formed = set()
        self._ready -= numbers
