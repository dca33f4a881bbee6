"""Whether and when another attempt follows one that has failed."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from distributor.core.text import counted
from distributor.errors import NodeLost, RunStalled, UnpicklableError, ValueTooLarge
from distributor.serialization.outcome import Failure

NOT_RETRIED = (UnpicklableError, ValueTooLarge)
"""Errors of ranks that have finished their training, and would raise the same again."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds before the third of several attempts that fail quickly, and at most."""
LONG_ATTEMPT = 60.0
"""Seconds after which the failure of an attempt no longer counts as quick."""
LATEST_KEPT = 9
"""How many of the latest failed attempts are kept whole, besides the first."""
KINDS_KEPT = 1000
"""How many different failures are counted."""


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that failed.

    Parameters
    ----------
    number : int
        The number of the attempt, from 0.
    world_size : int
        The number of its ranks.
    error : Exception
        The error that ended it. If ranks failed, ``rank_failures`` has the failure of each.
    preempted : mapping of str to list of int
        If it failed because a rank or executor died after a preemption notice: the hosts that had
        given notice, with their ranks; otherwise empty.
    """

    number: int
    world_size: int
    error: Exception
    preempted: Mapping[str, list[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        summary = str(self.error).strip().partition("\n")[0].rstrip(".")
        kind = type(self.error).__name__
        return f"attempt {self.number} on {counted(self.world_size, 'rank')}: {kind}: {summary}"


class FailedAttempts:
    """The failed attempts of a run: the first and the latest of them whole, the rest counted.

    Attributes
    ----------
    kept : list of FailedAttempt
        The first and the latest.
    count, num_preempted : int
        How many there are, and how many of them were preempted.
    num_quick : int
        How many in a row, up to the last, have failed quickly.
    num_same : int
        How many earlier ones have failed as the last one did.
    cause : Failure or None
        The failure of a rank that caused the last.
    """

    def __init__(self) -> None:
        self.kept: list[FailedAttempt] = []
        self.count = 0
        self.num_preempted = 0
        self.num_quick = 0
        self.num_same = 0
        self.cause: Failure | None = None
        self._counts: OrderedDict[tuple[str, int], int] = OrderedDict()

    @property
    def last(self) -> FailedAttempt:
        return self.kept[-1]

    def add(self, attempt: FailedAttempt, cause: Failure | None, *, is_quick: bool) -> None:
        self.kept.append(attempt)
        del self.kept[1:-LATEST_KEPT]
        self.count += 1
        self.num_preempted += bool(attempt.preempted)
        self.num_quick = self.num_quick + 1 if is_quick else 0
        self.cause = cause
        self.num_same = self._count_same(cause)

    def _count_same(self, failure: Failure | None) -> int:
        """Return how often the user's code has raised the same exception at the same step."""
        if failure is None or failure.step is None:
            return 0
        key = failure.summary, failure.step
        earlier = self._counts.pop(key, 0)
        self._counts[key] = earlier + 1
        if len(self._counts) > KINDS_KEPT:
            self._counts.popitem(last=False)
        return earlier


def pause_before_next(num_quick: int, run_id: str) -> float:
    """Return the seconds before the next attempt.

    There are none after the first failure: a process has died, and the rest is as it was. The
    pause doubles while attempts fail quickly, as they do while a service that they need is down.
    """
    if num_quick < 2:
        return 0.0
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(num_quick - 2, 32))
    return longest * random.Random(f"{run_id} {num_quick}").uniform(0.5, 1.0)


def is_preemption(
    error: Exception | None,
    cause: Failure | None,
    preempted: Mapping[str, list[int]],
    silent: tuple[str, ...],
) -> bool:
    """Return whether an attempt failed because a host with a preemption notice lost a process."""
    if cause is not None:
        return cause.step is None and cause.origin.host in preempted
    hosts = preempted.keys() & set(silent) if silent else preempted
    return isinstance(error, NodeLost) and bool(hosts)


def reason_to_stop(
    failed: FailedAttempts, max_failures: int, max_preemption_failures: int | None
) -> str | None:
    """Return why there is no further attempt; None if there is one."""
    last = failed.last.error
    is_retried = isinstance(last, (NodeLost, RunStalled)) or failed.cause is not None
    if not is_retried or isinstance(last, NOT_RETRIED):
        return "another attempt would not help"
    is_preempted = bool(failed.last.preempted)
    limits = max_failures, max_preemption_failures
    return limit_reached(failed.count, failed.num_preempted, is_preempted, *limits)


def limit_reached(
    count: int, num_preempted: int, is_preempted: bool, most: int, most_preempted: int | None
) -> str | None:
    """Return which limit so many failures exceed; None if another attempt may follow.

    `num_preempted` of them, and the last one if `is_preempted`, were of preempted attempts.
    """
    name, limit = "max_failures", most
    if most_preempted is not None:
        count -= num_preempted
        if is_preempted:
            name, limit, count = "max_preemption_failures", most_preempted, num_preempted
    return f"{name} is {limit}" if 0 <= limit < count else None
