"""Preemption notices: each is reported at the same call in all ranks, before a process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from distributor.errors import DistributorError
from distributor.train.runtime.store_channel import StoreChannel

AGREEMENT_TIMEOUT_SECONDS = 30.0
"""Seconds for all ranks to agree on a call; if they do not, the notice is ignored."""


class NoticeTracker:
    """Determines the call at which each notice is due, the same in all ranks.

    Until a notice comes, a call costs a lock and an addition. Then each rank publishes, on a thread
    of its own, how many calls it has begun, and waits at its next call for the numbers of the
    others. The notice is due at the first call that no rank had begun, so that a rank that is ahead
    never waits for a rank that waits for it.

    Parameters
    ----------
    agree : callable
        Takes a notice's number, and the number of calls that this rank has begun. Returns the call
        at which the notice is due, or 0 for none.

    Attributes
    ----------
    was_due : bool
        Whether a notice has been due at a call by now.
    """

    def __init__(self, agree: Callable[[int, int], int]) -> None:
        self._agree = agree
        self._lock = threading.Lock()
        self._calls = 0
        self._due_at: list[Future[int]] = []
        self.was_due = False

    def receive(self) -> None:
        """Receive a notice. Can be called by any thread."""
        due_at: Future[int] = Future()
        with self._lock:
            number, calls = len(self._due_at), self._calls

            def settle() -> None:
                due_at.set_result(self._agree(number, calls))

            threading.Thread(target=settle, name="notice", daemon=True).start()
            self._due_at.append(due_at)

    def is_due(self) -> bool:
        """Count a call, and return whether a notice is due at it."""
        with self._lock:
            self._calls += 1
            call, due_at = self._calls, list(self._due_at)
        is_due = call in [each.result() for each in due_at]
        self.was_due = self.was_due or is_due
        return is_due


def agree(number: int, calls: int) -> int:
    """Agree with all ranks on the call at which a notice is due.

    All ranks adopt the first recorded decision. A rank that has waited in vain for a late one
    records 0, and has not gone beyond the call at which the notice would otherwise be due.

    Parameters
    ----------
    number : int
        The notice's number.
    calls : int
        The number of calls that this rank has begun.

    Returns
    -------
    int
        The call, from 1; 0 for none, if the ranks cannot agree.
    """
    key = f"notice/{number}"
    try:
        channel = StoreChannel.connect(AGREEMENT_TIMEOUT_SECONDS)
        channel.set_own(key, calls)
        return int(channel.set_first(f"{key}/due at", str(_first_free_call(channel, key))))
    except Exception as error:
        _warn(error)
        return 0


def _first_free_call(channel: StoreChannel, key: str) -> int:
    try:
        calls: list[int] = channel.gather(key, AGREEMENT_TIMEOUT_SECONDS)
        return max(calls) + 1
    except DistributorError as error:
        _warn(error)
        return 0


def _warn(error: Exception) -> None:
    problem = "this run is about to lose a process, but is_preempted cannot return True"
    print(f"distributor: {problem} at the same call in all ranks: {error}", flush=True)
