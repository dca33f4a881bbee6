"""The events of a run on the driver: written to its log, and added to its account."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from distributor.errors import RunStalled
from distributor.rank.messages import RanksUse
from distributor.rank.step_clock import FIELDS
from distributor.report.account import Account
from distributor.report.event_log import VERSION, EventLog
from distributor.report.runs import Page, save_page
from distributor.report.verdict import TOO_SHORT, Verdict, recent_verdict_of, verdict_of
from distributor.screen.messages import warn_once
from distributor.screen.run_block import state_after
from distributor.serialization.outcome import Failure

FIRST_WINDOW, LAST_WINDOW, AGE_PER_SECOND = 1.0, 60.0, 360.0
"""Seconds of the first window of use, of the later ones, and the age per second of a window."""
RANKS_PER_SECOND, RANKS_OF_LAST = 200, 300
"""Ranks from which on windows are longer at first, and later."""
MAX_TEXT = 20_000
"""Characters of a traceback or stack."""
MAX_METRICS = 50
"""Metrics of one event."""
MAX_STACKS = 64
"""Ranks whose stacks are kept of one stall, and failures of one attempt with their tracebacks."""

_LATEST = {"memory", "gpu", "gpu_memory", "models"}
"""Fields of `Counters` that are the latest figures; others are differences."""


class RunEvents:
    """Receives the events of a run; a context manager while it lasts.

    Parameters
    ----------
    log : EventLog or None
        Where they are written.
    facts : mapping of str to object, optional
        What is known about the run before its start.
    clock : callable, optional
        Returns seconds since the epoch.
    """

    def __init__(
        self,
        log: EventLog | None = None,
        facts: Mapping[str, Any] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.log = log
        self._facts = facts or {}
        self.account = Account()
        epoch = time.time() - time.monotonic()  # of a clock that is never set back
        self._clock = clock or (lambda: epoch + time.monotonic())
        self._began = self._clock()
        self._lock = threading.Lock()  # any thread may ask for the verdict
        self._opened = ExitStack()
        self._progress: Mapping[str, Any] | None = None  # the latest of a window
        self._report: Mapping[str, Any] | None = None
        self._reset()

    def __enter__(self) -> RunEvents:
        if self.log:
            self._opened.enter_context(self.log)
        self.add("run", version=VERSION, **self._facts)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.account.attempts and self.account.attempts[-1]["state"] == "running":
            self.end_attempt(error)
        self.add("end", state=state_after(error), error=_text_of(error), goodput=self._goodput)
        self._opened.close()

    @property
    def verdict(self) -> Verdict | None:
        """The verdict about the run so far; None if it is too short for one."""
        with self._guarded():
            verdict = verdict_of(self.account).with_recent(recent_verdict_of(self.account))
            return None if verdict.verdict == TOO_SHORT else verdict
        return None

    @property
    def _goodput(self) -> float | None:
        with self._guarded():
            return self.account.goodput
        return None

    def save_page(self, path: str | os.PathLike[str] | None = None) -> Page:
        """Save the page of the run, as far as its log is written."""
        if self.log is None:
            raise ValueError("The run has no event log to make a page of: event_log is off.")
        self.log.flush()
        return save_page(self.log.path, path)

    def add(self, kind: str, **fields: Any) -> None:
        """Add an event of now."""
        event = {"at": round(self._clock(), 3), "event": kind, **fields}
        with self._guarded():
            self.account.add(event)
        if self.log:
            self.log.add(event)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Use the account on one thread at a time. No run fails because of its report."""
        try:
            with self._lock:
                yield
        except Exception as error:
            warn_once(f"The report of a run is not complete: {error!r}")

    def begin_attempt(self, number: int, ranks: int) -> None:
        """Add the begin of an attempt."""
        self._reset()
        self.add("attempt", number=number, ranks=ranks)

    def end_attempt(self, error: BaseException | None = None, state: str = "") -> None:
        """Add the end of an attempt, after what its ranks have done last.

        Its state is that after the error, unless another is given.
        """
        self._flush()
        state, is_stalled = state or state_after(error), isinstance(error, RunStalled)
        self.add("attempt_ended", state=state, error=_text_of(error), stalled=is_stalled)

    def note_use(self, use: RanksUse) -> None:
        """Note what ranks have done by now."""
        now = self._clock()
        for rank, *figures in use.ranks:
            self._latest[int(rank)] = now, figures

    def note_progress(self, done: float, total: float | None, metrics: Mapping[str, Any]) -> None:
        """Note rank 0's progress."""
        self._progress = {"done": done, "total": total, "metrics": _numbers(metrics)}

    def add_report(self, fields: Mapping[str, Any]) -> None:
        """Add a report; of those without a checkpoint, the latest of a window."""
        fields = {**fields, "metrics": _numbers(fields["metrics"])}
        if fields["checkpoint"]:
            self.add("report", **fields)
        else:
            self._report = fields

    def add_failure(self, failure: Failure) -> None:
        """Add the failure of a rank."""
        origin = failure.origin
        self._num_failures += 1
        self.add(
            "failure",
            attempt=origin.attempt,
            rank=origin.rank,
            host=origin.host,
            step=failure.step,
            collateral=failure.collateral,
            summary=failure.summary[:MAX_TEXT],
            text=failure.text[:MAX_TEXT] if self._num_failures < MAX_STACKS else "",
        )

    def lose(self, rank: int) -> None:
        """Add that another process takes the place of a rank, after what that has done last."""
        self._flush()
        self._counted.pop(rank, None)
        self.add("members", lost=[rank])

    def add_stacks(self, stacks: Mapping[int, str], seconds: float, stalled: bool) -> None:
        """Add the stacks of ranks that have stalled."""
        kept = {str(rank): stacks[rank][:MAX_TEXT] for rank in sorted(stacks)[:MAX_STACKS]}
        self.add("stall", seconds=seconds, stalled=stalled, stacks=kept)

    def tick(self) -> bool:
        """Add what has been noted, if a window is over, and return whether it is."""
        if self._clock() < self._due:
            return False
        self._flush()
        return True

    def _reset(self) -> None:
        self._latest: dict[int, tuple[float, list[float]]] = {}
        self._counted: dict[int, list[float]] = {}
        self._progress = self._report = None
        self._num_failures = 0
        self._window_began = self._clock()
        self._due = self._window_began + FIRST_WINDOW

    def _flush(self) -> None:
        now, began = self._clock(), self._window_began
        ranks = len(self._latest)
        last = max(LAST_WINDOW, LAST_WINDOW * ranks / RANKS_OF_LAST)
        interval = max(FIRST_WINDOW, ranks / RANKS_PER_SECOND, (now - self._began) / AGE_PER_SECOND)
        self._window_began, self._due = now, now + min(interval, last)
        if self._latest:
            rows = [self._row(rank, now) for rank in sorted(self._latest)]
            self.add("use", seconds=round(now - began, 3), ranks=rows)
            self._latest = {}
        if self._progress is not None:
            self.add("progress", **self._progress)
            self._progress = None
        if self._report is not None:
            self.add("report", **self._report)
            self._report = None

    def _row(self, rank: int, now: float) -> list[float]:
        at, new = self._latest[rank]
        old = self._counted.get(rank) or [0.0] * len(new)
        self._counted[rank] = list(map(max, old, new))  # one may be read while it changes
        return [rank, round(1e3 * (now - at)), *map(_difference, FIELDS, old, new)]


def _text_of(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return "".join(traceback.format_exception_only(error)).strip()[:MAX_TEXT]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, up to a limit: curves are drawn of these."""
    numbers = (
        (name, value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    return dict(
        itertools.islice((each for each in numbers if abs(each[1]) < math.inf), MAX_METRICS)
    )


def _difference(name: str, old: float, new: float) -> float:
    if name in _LATEST:
        return round(new)
    if name == "steps":
        return round(new - old)
    # Not below zero, and without a loss: what is rounded off is in the next difference.
    return max(0, round(1e3 * new) - round(1e3 * old))
