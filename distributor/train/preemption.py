"""A chance to report before a process of the run ends, at one call in all ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from distributor.node import notices
from distributor.train.words import Words

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
    """

    def __init__(self, agree: Callable[[int, int], int]) -> None:
        self._agree = agree
        self._lock = threading.Lock()
        self._calls = 0
        self._told_at: list[Future[int]] = []

    def hear(self) -> None:
        """Take a notice. From any thread."""
        told_at: Future[int] = Future()
        with self._lock:
            number, calls = len(self._told_at), self._calls
            self._told_at.append(told_at)

        def settle() -> None:
            told_at.set_result(self._agree(number, calls))

        threading.Thread(target=settle, name="notice", daemon=True).start()

    def due(self) -> bool:
        """Tell whether a notice is told at this call."""
        with self._lock:
            self._calls += 1
            call, told_at = self._calls, list(self._told_at)
        return call in [each.result() for each in told_at]


def agree(number: int, calls: int) -> int:
    """Agree with all ranks on the call at which a notice is told; 0, which is none, if they cannot.

    Parameters
    ----------
    number : int
        Which notice it is.
    calls : int
        How many calls this rank has begun.
    """
    try:
        words = Words.here(AGREE_SECONDS)
        words.tell_mine(f"notice/{number}", calls)
        said: list[int] = words.hear_all(f"notice/{number}")
        return max(said) + 1
    except Exception as error:
        print(
            "distributor: this run is about to lose a process, but not all ranks can be told of "
            f"it, for not all call is_preempted: {error}",
            flush=True,
        )
        return 0


_notices: list[Notices] = []


def is_preempted() -> bool:
    """Tell, in all ranks at one call, that the run is about to lose a process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    if not _notices:
        _notices.append(Notices(agree))
        notices.heed(_notices[0].hear)
    return _notices[0].due()
