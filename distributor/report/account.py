"""Where the time of a run's ranks went, computed from its events as they come.

Each second of each rank is in one bucket, so that the buckets of a rank add up to the time of the
run. The time after a rank's latest step is open until the next one ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, truediv
from typing import Any, NamedTuple

from distributor.rank.step_clock import FIELDS, Counters

BUCKETS = (
    "start",
    "data",
    "compute",
    "wait",
    "checkpoint",
    "lost",
    "recovery",
    "stall",
    "idle",
    "end",
)
START, DATA, COMPUTE, WAIT, CHECKPOINT, LOST, RECOVERY, STALL, IDLE, END = range(len(BUCKETS))
WORK = (DATA, COMPUTE, WAIT)
"""What is lost if an attempt fails after it."""
RECENT_SECONDS = 300.0
"""Seconds of the verdict about the latest part of a run."""
NUM_PARTS = 16
"""Parts into which a run is divided to see whether one rank is always the slowest."""


class Row(NamedTuple):
    """What one rank did in a window.

    Parameters
    ----------
    rank : int
        The rank.
    age : float
        How long before the end of the window its counters were so (seconds).
    use : Counters
        The differences to the window before, but for the figures of memory and GPUs.
    """

    rank: int
    age: float
    use: Counters

    @classmethod
    def of(cls, row: Sequence[float]) -> Row:
        """Return a row of an event ``use``, whose times are in milliseconds."""
        return cls(int(row[0]), row[1] / 1e3, Counters(*map(truediv, row[2:], _UNITS)))


_UNSCALED = {"memory", "gpu", "gpu_memory", "steps", "models"}
_UNITS = [1.0 if name in _UNSCALED else 1e3 for name in FIELDS]


class Window(NamedTuple):
    """What ranks did in a part of a run: for each rank the sum of its counters."""

    begin: float
    end: float
    rows: dict[int, Counters]


def added(a: Counters, b: Counters) -> Counters:
    """Return the sum; of memory the highest figure, and of a GPU's utilization the mean."""
    alive = a.alive + b.alive
    return Counters(*map(add, a, b))._replace(
        memory=max(a.memory, b.memory),
        gpu=(a.gpu * a.alive + b.gpu * b.alive) / alive if alive else b.gpu,
        gpu_memory=max(a.gpu_memory, b.gpu_memory),
        models=max(a.models, b.models),
    )


def joined(windows: Iterable[Window]) -> Window:
    """Return the sum of windows that follow each other."""
    begin, end, rows = math.inf, -math.inf, dict[int, Counters]()
    for window in windows:
        begin, end = min(begin, window.begin), max(end, window.end)
        for rank, use in window.rows.items():
            rows[rank] = added(rows[rank], use) if rank in rows else use
    return Window(begin, end, rows)


@dataclass
class RankAccount:
    """One rank of a run.

    Attributes
    ----------
    seconds : list of float
        Its time in each bucket.
    until : float
        Up to when (seconds since the epoch) its time is in them.
    since_checkpoint : list of float
        The part that another attempt would have to do again.
    stopped : float
        Seconds in which it was stopped that are not in a bucket yet.
    attempt_steps : float
        Its steps in the current attempt.
    launching : int
        The bucket of its time until its first step.
    use : Counters
        The sum of its counters.
    """

    host: str = ""
    state: str = "starting"
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(BUCKETS))
    since_checkpoint: list[float] = field(default_factory=lambda: [0.0] * len(BUCKETS))
    until: float = 0.0
    alive_until: float = 0.0
    stopped: float = 0.0
    attempt_steps: float = 0.0
    launching: int = START
    use: Counters = field(default_factory=Counters)

    def begin(self) -> None:
        """Begin as another process."""
        self.state, self.alive_until, self.attempt_steps, self.stopped = "starting", 0.0, 0.0, 0.0


OnSegment = Callable[[int, float, float, Sequence[float]], object]
"""Takes a rank, the begin and end of a segment of its time, and the seconds in each bucket."""


class Account:
    """The account of a run, to which its events are added in their order.

    Parameters
    ----------
    on_segment : callable
        Called for each segment of a rank's time.
    on_lost : callable
        Called with the ranks' begin and end of what has to be done again.
    """

    def __init__(
        self,
        on_segment: OnSegment = lambda *_: None,
        on_lost: Callable[[float, float], object] = lambda *_: None,
    ) -> None:
        self._on_segment = on_segment
        self._on_lost = on_lost
        self.facts: dict[str, Any] = {}
        self.began = self.now = 0.0
        self.ended: float | None = None
        self.state = "running"
        self.error: str | None = None
        self.ranks: dict[int, RankAccount] = {}
        self.attempts: list[dict[str, Any]] = []
        self.stalls: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.preemptions: list[dict[str, Any]] = []
        self.num_checkpoints = 0
        self.recent: deque[Window] = deque()
        self.parts: list[Window] = []
        self._windows_of_part = 1
        self._num_in_part = 0
        self._checkpoint_at = 0.0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event; one of an unknown kind only moves the time."""
        self.now = max(self.now, float(event["at"]))
        if handler := _HANDLERS.get(event.get("event", "")):
            handler(self, event)

    # Sums

    def total(self) -> list[float]:
        """Return the seconds of all ranks in each bucket."""
        sums = [0.0] * len(BUCKETS)
        for rank in self.ranks.values():
            for bucket, seconds in enumerate(self.seconds_of(rank)):
                sums[bucket] += seconds
        return sums

    def seconds_of(self, rank: RankAccount) -> list[float]:
        """Return a rank's seconds in each bucket, with its open time as what it probably is."""
        seconds = list(rank.seconds)
        if self.ended is None:
            bucket = rank.launching
            if self.attempts and self.attempts[-1]["state"] == "running":
                bucket = COMPUTE if rank.attempt_steps else bucket
            seconds[bucket] += max(0.0, self.now - rank.until)
        return seconds

    @property
    def goodput(self) -> float | None:
        """The part of the ranks' time in steps that count; None if there are no steps."""
        sums = self.total()
        if not any(rank.use.steps for rank in self.ranks.values()) or not sum(sums):
            return None
        return (sums[COMPUTE] + sums[WAIT]) / sum(sums)

    @property
    def duration(self) -> float:
        """Seconds of the run so far."""
        return (self.now if self.ended is None else self.ended) - self.began

    # Events

    def _on_run(self, event: Mapping[str, Any]) -> None:
        self.facts = dict(event)
        self.began = self._checkpoint_at = event["at"]

    def _on_attempt(self, event: Mapping[str, Any]) -> None:
        at, number = event["at"], event["number"]
        if self.attempts and self.attempts[-1]["state"] == "failed":
            self._lose(self.attempts[-1]["ended"])
        old, self.ranks = self.ranks, {}
        for number_of_rank in range(max(event["ranks"], len(old))):
            rank = old.get(number_of_rank) or RankAccount(until=self.began)
            self.ranks[number_of_rank] = rank
            rank.launching = START if not number else RECOVERY
            self._spend(number_of_rank, at, rank.launching)
            rank.begin()
            rank.since_checkpoint = [0.0] * len(BUCKETS)
        self._checkpoint_at = at
        self.attempts.append(
            {"number": number, "began": at, "ended": None, "ranks": event["ranks"]}
            | {"state": "running", "error": None}
        )

    def _on_started(self, event: Mapping[str, Any]) -> None:
        if self.attempts:  # further ranks may have joined it
            attempt, most = self.attempts[-1], 1 + max(event["ranks"], default=-1)
            attempt["ranks"] = max(attempt["ranks"], most)
            for number in range(len(self.ranks), most):
                self.ranks[number] = RankAccount(until=event["at"])
        for rank in self._known(event["ranks"]):
            rank.host, rank.state = event["host"], "running"

    def _on_ended(self, event: Mapping[str, Any]) -> None:
        for rank in self._known(event["ranks"]):
            if rank.state in ("starting", "running"):
                rank.state = event["state"]

    def _known(self, numbers: Iterable[int]) -> list[RankAccount]:
        """Return ranks; a full disk may have cost the log the line of their attempt."""
        return [self.ranks[number] for number in numbers if number in self.ranks]

    def _on_use(self, event: Mapping[str, Any]) -> None:
        at = event["at"]
        rows = list(map(Row.of, event["ranks"]))
        for row in rows:
            self._add_row(row, at)
        if not self.num_checkpoints and any(row.use.checkpoint for row in rows):
            self._note_checkpoint(at)  # one that the program has saved by itself
        window = Window(at - event["seconds"], at, {row.rank: row.use for row in rows})
        self.recent.append(window)
        while self.recent[0].end < at - RECENT_SECONDS:
            self.recent.popleft()
        self._add_to_parts(window)

    def _add_row(self, row: Row, at: float) -> None:
        rank, use = self.ranks.get(row.rank), row.use
        if rank is None:
            return
        rank.attempt_steps += use.steps
        rank.use = added(rank.use, use)
        if use.alive and not rank.alive_until:
            rank.alive_until = at - row.age - use.alive
            self._spend(row.rank, rank.alive_until, rank.launching)
            rank.state = "running"
        rank.alive_until += use.alive
        rank.stopped += use.stopped
        self._spend_use(row.rank, use)

    def _on_members(self, event: Mapping[str, Any]) -> None:
        """Another process takes the place of a lost rank, without which the others go on."""
        for number in event["lost"]:
            if (rank := self.ranks.get(number)) is not None:
                self._spend(number, event["at"], COMPUTE if rank.attempt_steps else rank.launching)
                rank.begin()
                rank.launching = RECOVERY

    def _spend_use(self, number: int, use: Counters) -> None:
        rank, seconds = self.ranks[number], [0.0] * len(BUCKETS)
        seconds[WAIT] = min(use.waited, use.stepped)
        seconds[rank.launching] = use.first
        seconds[DATA] = use.data
        seconds[CHECKPOINT] = use.checkpoint
        seconds[COMPUTE] = use.stepped - seconds[WAIT]
        # It may have been stopped after its latest step. What does not fit there was before.
        pending = max(0.0, rank.alive_until - rank.until - sum(seconds))
        for bucket in (COMPUTE, DATA, rank.launching, WAIT):
            stopped = min(max(0.0, rank.stopped - pending), seconds[bucket])
            seconds[bucket] -= stopped
            seconds[STALL] += stopped
            rank.stopped -= stopped
        first, seconds[rank.launching] = seconds[rank.launching], 0.0
        self._spend(number, rank.until + first, rank.launching)
        begin = rank.until
        rank.until = begin + sum(seconds)
        self._count(number, begin, rank.until, seconds)

    def _spend(self, number: int, until: float, bucket: int) -> None:
        """Put a rank's time up to a moment into one bucket."""
        rank = self.ranks[number]
        if until <= rank.until:
            return
        seconds = [0.0] * len(BUCKETS)
        seconds[bucket] = until - rank.until
        begin, rank.until = rank.until, until
        self._count(number, begin, until, seconds)

    def _count(self, number: int, begin: float, end: float, seconds: list[float]) -> None:
        rank = self.ranks[number]
        after = 0.0
        if end > begin and end > self._checkpoint_at:
            after = (end - max(begin, self._checkpoint_at)) / (end - begin)
        for bucket, each in enumerate(seconds):
            if each:
                rank.seconds[bucket] += each
                rank.since_checkpoint[bucket] += each * after
        self._on_segment(number, begin, end, seconds)

    def _on_report(self, event: Mapping[str, Any]) -> None:
        if event.get("checkpoint"):
            self.num_checkpoints += 1
            self._note_checkpoint(event["at"])

    def _note_checkpoint(self, at: float) -> None:
        self._checkpoint_at = at
        for rank in self.ranks.values():
            rank.since_checkpoint = [0.0] * len(BUCKETS)

    def _on_attempt_ended(self, event: Mapping[str, Any]) -> None:
        if not self.attempts:
            return
        at, attempt = event["at"], self.attempts[-1]
        attempt.update(ended=at, state=event["state"], error=event.get("error"))
        is_stalled = bool(event.get("stalled"))
        last = max((rank.alive_until for rank in self.ranks.values()), default=at)
        for number, rank in self.ranks.items():
            if number >= attempt["ranks"]:
                self._spend(number, at, IDLE)
                continue
            if rank.state in ("starting", "running"):
                rank.state = "finished" if event["state"] == "finished" else "stopped"
            open_bucket = COMPUTE if not rank.attempt_steps else END
            if event["state"] != "finished":
                open_bucket = STALL if is_stalled else COMPUTE
            if rank.alive_until:
                until = min(rank.alive_until, at)
                self._spend(number, min(rank.until + rank.stopped, until), STALL)
                self._spend(number, until, open_bucket)
            else:  # it has never started
                self._spend(number, at, rank.launching)
            if event["state"] == "finished":
                self._spend(number, min(last, at), IDLE)
            elif is_stalled:
                self._spend(number, at, STALL)

    def _lose(self, ended: float) -> None:
        """Put the work since the latest checkpoint of an attempt that failed into LOST."""
        for rank in self.ranks.values():
            for bucket in WORK:
                lost = rank.since_checkpoint[bucket]
                rank.seconds[bucket] -= lost
                rank.seconds[LOST] += lost
        self._on_lost(self._checkpoint_at, ended)

    def _on_end(self, event: Mapping[str, Any]) -> None:
        self.ended, self.state, self.error = event["at"], event["state"], event.get("error")
        for number in self.ranks:
            self._spend(number, event["at"], END)

    def _add_to_parts(self, window: Window) -> None:
        if self._num_in_part:
            self.parts[-1] = joined([self.parts[-1], window])
        else:
            self.parts.append(window)
        self._num_in_part = (self._num_in_part + 1) % self._windows_of_part
        if len(self.parts) >= 2 * NUM_PARTS and not self._num_in_part:
            pairs = zip(self.parts[::2], self.parts[1::2], strict=True)
            self.parts = [joined(pair) for pair in pairs]
            self._windows_of_part *= 2


_HANDLERS: dict[str, Callable[[Account, Mapping[str, Any]], None]] = {
    "run": Account._on_run,
    "attempt": Account._on_attempt,
    "started": Account._on_started,
    "ended": Account._on_ended,
    "members": Account._on_members,
    "use": Account._on_use,
    "report": Account._on_report,
    "failure": lambda account, event: account.failures.append(dict(event)),
    "stall": lambda account, event: account.stalls.append(dict(event)),
    "preempted": lambda account, event: account.preemptions.append(dict(event)),
    "attempt_ended": Account._on_attempt_ended,
    "end": Account._on_end,
}
