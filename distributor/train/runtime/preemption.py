"""``is_preempted``: True at the same call in all ranks, before a process of the run ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from distributor.errors import DistributorError
from distributor.node.worker.worker_context import worker_context
from distributor.train.runtime.store_channel import StoreChannel

AGREE_SECONDS = 30.0
"""Seconds for all ranks to agree; where one does not, the notice is passed over."""


class Notices:
    """Tells of each notice at one call, the same in all ranks.

    Calls cost nothing until a notice comes. Then every rank says, on a thread of its own, how many
    calls it has begun, and waits at the next for what the others say: the notice is told at the
    first call that none had begun. No rank that is ahead waits for one that waits for it.

    Parameters
    ----------
    agree : callable
        Of a notice's number and the calls that this rank has begun: the call at which it is told.

    Attributes
    ----------
    told : bool
        Whether one has been told by now.
    """

    def __init__(self, agree: Callable[[int, int], int]) -> None:
        self._agree = agree
        self._lock = threading.Lock()
        self._calls = 0
        self.told = False
        self._told_at: list[Future[int]] = []

    def hear(self) -> None:
        """Take a notice. From any thread."""
        told_at: Future[int] = Future()
        with self._lock:
            number, calls = len(self._told_at), self._calls

            def settle() -> None:
                told_at.set_result(self._agree(number, calls))

            threading.Thread(target=settle, name="notice", daemon=True).start()
            self._told_at.append(told_at)

    def due(self) -> bool:
        """Tell whether a notice is told at this call."""
        with self._lock:
            self._calls += 1
            call, told_at = self._calls, list(self._told_at)
        due = call in [each.result() for each in told_at]
        self.told = self.told or due
        return due


def agree(number: int, calls: int) -> int:
    """Agree with all ranks on the call at which a notice is told; 0, which is none, if they cannot.

    What one rank has found out first is what all take: one that waited in vain, for a rank that
    was late, has not gone beyond the call at which the others would be told.

    Parameters
    ----------
    number : int
        Which notice it is.
    calls : int
        How many calls this rank has begun.
    """
    about = f"notice/{number}"
    try:
        channel = StoreChannel.here(AGREE_SECONDS)
        channel.set_own(about, calls)
        return int(channel.set_first(f"{about}/told at", str(_told_at(channel, about))))
    except Exception as error:
        _pass_over(error)
        return 0


def _told_at(channel: StoreChannel, about: str) -> int:
    try:
        calls: list[int] = channel.gather(about, AGREE_SECONDS)
        return max(calls) + 1
    except DistributorError as error:
        _pass_over(error)
        return 0


def _pass_over(error: Exception) -> None:
    why = "this run is about to lose a process, but its ranks cannot be told of it together"
    print(f"distributor: {why}: {error}", flush=True)


_notices: list[Notices] = []


def is_preempted() -> bool:
    """Tell, in all ranks at one call, that the run is about to lose a process."""
    if not worker_context().is_rank:
        return False
    if not _notices:
        _notices.append(Notices(agree))
        worker_context().preemption_notices.subscribe(_notices[0].hear)
    return _notices[0].due()


def was_told() -> bool:
    """Tell whether `is_preempted` has told of a notice by now."""
    return bool(_notices) and _notices[0].told
