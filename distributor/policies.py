"""Whether and when another attempt follows one that has failed."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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
        How many there are, and how many of them, or of the survived losses, were preemptions.
    num_survived : int
        How many losses of ranks, or of a node with its ranks, attempts have survived.
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
        self.num_survived = 0
        self.num_quick = 0
        self.num_same = 0
        self.cause: Failure | None = None
        self._counts: Counter[tuple[str, int]] = Counter()

    @property
    def all(self) -> int:
        """How many failures count, those that the attempt has survived included."""
        return self.count + self.num_survived

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

    def survive(self, is_preempted: bool) -> None:
        """Count a loss without which the attempt goes on."""
        self.num_survived += 1
        self.num_preempted += is_preempted

    def take_back(self, is_preempted: bool) -> None:
        """Do not count a loss that has ended its attempt after all."""
        self.num_survived -= 1
        self.num_preempted -= is_preempted

    def _count_same(self, failure: Failure | None) -> int:
        """Return how often the user's code has raised the same exception at the same step."""
        if failure is None or failure.step is None:
            return 0
        key = failure.summary, failure.step
        self._counts[key] += 1
        return self._counts[key] - 1


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
    return limit_reached(failed.all, failed.num_preempted, is_preempted, *limits)


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


UNLINKED_SECONDS = 60.0
"""Seconds that nodes without a link have to start their ranks, and to enforce ``timeout``.

They enforce it to the second. The driver does not know when their ranks start, so it ends only
the tasks that do not end by themselves.
"""
STOP_SECONDS = 15.0
"""Seconds for nodes to stop their ranks and end, after which they are cancelled."""
UNLINKED_STOP_SECONDS = 2.0
"""The same if a node has lost its link, so that only its launcher can stop it, and is no cause."""


class Deadlines:
    """When the ranks of an attempt must have started, and when they must have ended.

    Parameters
    ----------
    start : float
        When ``start_timeout`` ends.
    timeout : float or None
        Seconds that the ranks may take once they have started.
    """

    def __init__(self, start: float, timeout: float | None) -> None:
        self.start = start
        self._timeout = math.inf if timeout is None else timeout
        self._end = math.inf
        self._stopped_by = math.inf
        self._stop_seconds = STOP_SECONDS

    def start_run(self, now: float) -> None:
        """Start the clock of ``timeout``, the first time."""
        self._end = min(self._end, now + self._timeout)

    def start_unlinked_run(self, now: float, *, prepares: bool) -> None:
        """Start the same clock for nodes that cannot report when their ranks start."""
        started = max(now, self.start) if prepares else now
        self._end = started + self._timeout + UNLINKED_SECONDS

    def start_stop(self, now: float, *, in_vain: bool) -> None:
        """Start the clock of nodes that end by themselves once their ranks are stopped.

        `in_vain` is whether a node does not learn of it, and is not waited for.
        """
        self._stop_seconds = UNLINKED_STOP_SECONDS if in_vain else STOP_SECONDS
        self._stopped_by = now + self._stop_seconds

    def note_output(self, now: float) -> None:
        """Restart that clock, if it runs: a node is not late while it sends."""
        if self._stopped_by < math.inf:
            self._stopped_by = now + self._stop_seconds

    def is_stop_overdue(self, now: float) -> bool:
        """Return, once, whether these nodes have not ended in time."""
        if now <= self._stopped_by:
            return False
        self._stopped_by = math.inf
        return True

    def passed(self, now: float, *, all_started: bool) -> Literal["start", "end"] | None:
        if now > self.start and not all_started:
            return "start"
        return "end" if now > self._end else None


AFTER_CAUSE_SECONDS = 0.5
"""Seconds in which other ranks may fail on their own, after a failure that looks like a cause."""
AFTER_COLLATERAL_SECONDS = 5.0
"""The same after a failure that looks like a consequence of another one, which is still unknown."""
LATE_START_SECONDS = 10.0
"""Additional seconds while some ranks are still starting: they may have the same fault."""
DRIVER_FIRST_SECONDS = AFTER_CAUSE_SECONDS + AFTER_COLLATERAL_SECONDS + LATE_START_SECONDS
"""Seconds in which the driver, which sees all nodes, decides before a node does."""


class FailureGracePeriod:
    """The time between the first failure of a run and the stop of the ranks that still run.

    All ranks that fail at the same time for the same reason should be reported, and a lost
    connection is often noticed before the death that caused it.

    Parameters
    ----------
    expected : int
        Number of participants (ranks or nodes) that have to start.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._started: set[int] = set()
        self._due_at = math.inf

    def note_start(self, number: int, now: float) -> None:
        self._started.add(number)
        if self._due_at < math.inf:
            self._due_at = max(self._due_at, now + AFTER_CAUSE_SECONDS)

    def note_failure(self, failure: Failure, now: float) -> None:
        seconds = AFTER_COLLATERAL_SECONDS if failure.collateral else AFTER_CAUSE_SECONDS
        self._due_at = min(self._due_at, now + seconds)

    def is_over(self, now: float) -> bool:
        all_started = len(self._started) >= self._expected
        return now >= self._due_at + (0.0 if all_started else LATE_START_SECONDS)


HOLD_SECONDS = 30.0
"""Seconds without a further task after which the first round of waiting is given up."""
LONGEST_HOLD = 300.0
"""The same of a later round, at most."""
PAUSES = 2.0, 30.0
"""Seconds between the first two rounds, and at most, in the mean."""


class Gathering:
    """The rounds in which a run gathers the tasks that it needs at once.

    Two runs that each hold a part of what the other needs would wait for ever. So a round in which
    nothing comes any more is given up, and the next one begins after a pause. Each round waits
    longer, and random factors see to it that one of several runs has all slots to itself.

    Parameters
    ----------
    run_id : str
        Determines the random factors.
    now : float
        When the first round begins (seconds).
    """

    def __init__(self, run_id: str, now: float) -> None:
        self._random = random.Random(run_id)
        self._round = 0
        self._held = 0
        self._begin(now)

    def _begin(self, now: float) -> None:
        longest = min(HOLD_SECONDS * 1.5**self._round, LONGEST_HOLD)
        self._hold = longest * self._random.uniform(0.5, 1.0)
        self._held_since = now

    def note(self, held: int, now: float) -> None:
        """Note how many tasks hold slots."""
        if held > self._held or not held:
            self._held_since = now
        self._held = held

    def is_futile(self, now: float) -> bool:
        """Return whether the tasks that hold slots have waited in vain."""
        return self._held > 0 and now >= self._held_since + self._hold

    def give_back(self, now: float) -> float:
        """End the round; return the seconds of the pause before the next one."""
        first, longest = PAUSES
        pause = min(first * 1.5**self._round, longest) * self._random.uniform(0.5, 1.5)
        self._round += 1
        self._held = 0
        self._begin(now + pause)
        return pause


MIN_INTERVAL, MAX_INTERVAL = 0.5, 10.0
"""Bounds of the seconds between two measurements of a node's activity."""
INTERVALS = 10
"""Measurements within the shorter of the two limits."""


def activity_interval(warning: float | None, timeout: float | None) -> float | None:
    """Return the seconds between two measurements of activity; None if no limit needs them."""
    limits = [limit for limit in (warning, timeout) if limit is not None]
    if not limits:
        return None
    return min(max(min(limits) / INTERVALS, MIN_INTERVAL), MAX_INTERVAL)


class Stall(NamedTuple):
    """A limit that has passed while all ranks were idle."""

    setting: str
    seconds: float

    @property
    def ends_attempt(self) -> bool:
        return self.setting == "stall_timeout"


class StallWatch:
    """Compares for how long the nodes of an attempt have been idle with the user's limits.

    Parameters
    ----------
    warning, timeout : float or None
        ``stall_warning`` and ``stall_timeout``.
    """

    def __init__(self, warning: float | None, timeout: float | None) -> None:
        self._warning = math.inf if warning is None else warning
        self._timeout = math.inf if timeout is None else timeout
        self._idle_since: dict[int, float] = {}
        self._has_warned = False

    def note(self, node: int, idle_seconds: float, now: float) -> None:
        """Note for how long a node has been idle; 0.0 if it is active."""
        if idle_seconds:
            self._idle_since[node] = now - idle_seconds
        else:
            self.forget(node)

    def forget(self, node: int) -> None:
        """Forget a node whose activity is no longer known."""
        self._idle_since.pop(node, None)
        self._has_warned = False

    def check(self, nodes: Set[int], now: float) -> Stall | None:
        """Return the stall if all of these nodes have been idle for longer than a limit.

        Each stall is returned once as a warning, before the ranks are active again.
        """
        if not nodes or not nodes <= self._idle_since.keys():
            return None
        seconds = now - max(self._idle_since[node] for node in nodes)
        if seconds >= self._timeout:
            return Stall("stall_timeout", self._timeout)
        if seconds >= self._warning and not self._has_warned:
            self._has_warned = True
            return Stall("stall_warning", self._warning)
        return None
