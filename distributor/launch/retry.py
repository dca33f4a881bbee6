"""Runs a job's attempts: launches, returns the values, and retries or raises after a failure."""

from __future__ import annotations

import random
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from distributor.core.text import counted, listed
from distributor.errors import (
    DistributorError,
    NodeLost,
    RunStalled,
    UnpicklableError,
    ValueTooLarge,
)
from distributor.launch.hangs.stack_requests import register_run
from distributor.launch.job import Job, Launcher
from distributor.launch.output.messages import notify, warn
from distributor.launch.output.sink import DriverSink, Listeners
from distributor.launch.settings import Settings
from distributor.serialization.outcome import (
    Failure,
    Outcome,
    Value,
    add_note,
    cause_first,
    raise_first,
)

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


def run(job: Job, launcher: Launcher) -> list[Any]:
    """Run a job, with further attempts after failures, and return its ranks' values.

    Returns
    -------
    list
        Rank 0's value, or with ``keep_all`` every rank's value in rank order.

    Raises
    ------
    Exception
        The error of the last attempt. ``rank_failures`` has the failures of its ranks and, if
        there were several attempts, ``attempts`` has the first and the latest of them.
    """
    listeners = Listeners(job.listeners)
    with _opened_datasets(job):
        return _run_attempts(job, launcher, listeners)


def _opened_datasets(job: Job) -> AbstractContextManager[None]:
    if job.datasets is None:
        return nullcontext()
    return job.datasets.opened(job.run_id, job.call_site, job.settings.pool, job.cancellation)


def _run_attempts(job: Job, launcher: Launcher, listeners: Listeners) -> list[Any]:
    history = _History()
    while True:
        silent = getattr(history.last.error, "silent", ()) if history.count else ()
        job = job.for_attempt(history.count, silent)
        began = time.monotonic()
        resized_launcher, count = launcher.resolve_size(job)
        if job.datasets is not None:
            job.datasets.check(count)
        try:
            sized = replace(job, num_processes=count)
            values = _run_attempt(sized, resized_launcher, listeners)
        except Exception as error:
            job.graceful_shutdown.end_attempt()
            preempted = job.preempted if _is_preemption(error, job.preempted) else {}
            is_quick = time.monotonic() < began + LONG_ATTEMPT and not job.progress.is_saved
            history.add(FailedAttempt(history.count, count, error, preempted), is_quick)
            listeners.attempt_failed(job.attempt, error)
            sigterm_received = job.graceful_shutdown.sigterm_received
            reason = _reason_to_stop(history, job.settings, sigterm_received)
            if reason is not None:
                _add_attempts(history, reason)
                if job.logs is not None:
                    add_note(error, f"The output of all ranks is in {job.logs}.")
                if sigterm_received:
                    # This process ends before it can show the error.
                    notify("".join(traceback.format_exception(error)))
                raise
        else:
            job.notify(f"Finished {launcher.training(count)}", job.settings.spelling.logger)
            return values
        _announce_next(job, history)


def _announce_next(job: Job, history: _History) -> None:
    """Show why there is another attempt, and pause before it."""
    seconds = pause_before_next(history.num_quick, job.run_id)
    in_seconds = f" in {seconds:.1f} s" if seconds else ""
    job.notify(f"Failed: {history.last}. Starting the next attempt{in_seconds}.")
    if history.num_same:
        warn(
            f"Attempt {history.last.number} failed at the same step in the same way as "
            f"{counted(history.num_same, 'earlier attempt')}."
        )
    if seconds:
        job.cancellation.pause(seconds)


def pause_before_next(num_quick: int, run_id: str) -> float:
    """Return the seconds before the next attempt.

    There are none after the first failure: a process has died, and the rest is as it was. The
    pause doubles while attempts fail quickly, as they do while a service that they need is down.

    Parameters
    ----------
    num_quick : int
        How many attempts in a row, up to the last, have failed quickly.
    run_id : str
        The run: runs that fail together do not try again together.
    """
    if num_quick < 2:
        return 0.0
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(num_quick - 2, 32))
    return longest * random.Random(f"{run_id} {num_quick}").uniform(0.5, 1.0)


class _History:
    """The failed attempts of a run: the first and the latest of them whole, the rest counted."""

    def __init__(self) -> None:
        self.kept: list[FailedAttempt] = []
        self.count = 0
        self.num_preempted = 0
        self.num_quick = 0
        """How many attempts in a row, up to the last, have failed quickly."""
        self.num_same = 0
        """How many earlier attempts have failed as the last one did."""
        self._counts: OrderedDict[tuple[str, int], int] = OrderedDict()

    @property
    def last(self) -> FailedAttempt:
        return self.kept[-1]

    def add(self, attempt: FailedAttempt, is_quick: bool) -> None:
        self.kept.append(attempt)
        del self.kept[1:-LATEST_KEPT]
        self.count += 1
        self.num_preempted += bool(attempt.preempted)
        self.num_quick = self.num_quick + 1 if is_quick else 0
        self.num_same = self._count_same(attempt.error)

    def _count_same(self, error: Exception) -> int:
        """Return how often the user's code has raised the same exception at the same step."""
        failure = _first_failure(error)
        if failure is None or failure.step is None:
            return 0
        key = failure.summary, failure.step
        earlier = self._counts.pop(key, 0)
        self._counts[key] = earlier + 1
        if len(self._counts) > KINDS_KEPT:
            self._counts.popitem(last=False)
        return earlier


def _run_attempt(job: Job, launcher: Launcher, listeners: Listeners) -> list[Any]:
    listeners.call(lambda listener: listener.begins(job.attempt, job.num_processes))
    with DriverSink(job, listeners) as sink:
        with register_run(job.run_id, job.stack_requests):
            outcomes = launcher.launch(job, sink)
        # Outside register_run, because a generator's context cannot pass on a frozen exception.
        try:
            return values_of(job, outcomes)
        except (ModuleNotFoundError, FileNotFoundError) as error:
            if hint := launcher.hint(error, job):
                add_note(error, hint)
            raise


def _is_preemption(error: Exception, preempted: Mapping[str, list[int]]) -> bool:
    """Return whether an attempt failed because a host with a preemption notice lost a process."""
    failure = _first_failure(error)
    if failure is not None:
        return failure.step is None and failure.origin.host in preempted
    silent = getattr(error, "silent", ())
    hosts = preempted.keys() & set(silent) if silent else preempted
    return isinstance(error, NodeLost) and bool(hosts)


def _reason_to_stop(history: _History, settings: Settings, sigterm_received: bool) -> str | None:
    """Return why there is no further attempt; None if there is one."""
    if sigterm_received:
        return "this process received SIGTERM"
    last = history.last.error
    is_retried = isinstance(last, (NodeLost, RunStalled)) or _first_failure(last) is not None
    if not is_retried or isinstance(last, NOT_RETRIED):
        return "another attempt would not help"
    name, count = _limiting(history, settings)
    limit = getattr(settings, name)
    return f"{name} is {limit}" if 0 <= limit < count else None


def _limiting(history: _History, settings: Settings) -> tuple[str, int]:
    """Return the setting that limits failures like the last, and how many of them there are."""
    if settings.max_preemption_failures is None:
        return "max_failures", history.count
    if history.last.preempted:
        return "max_preemption_failures", history.num_preempted
    return "max_failures", history.count - history.num_preempted


def _first_failure(error: Exception) -> Failure | None:
    """Return the failure of the rank that caused an error, if a rank did."""
    failures: Mapping[int, Failure] = getattr(error, "rank_failures", {})
    return next(iter(failures.values()), None)


def _add_attempts(history: _History, reason: str) -> None:
    """Add the attempts to the error that is raised. The user's own exception may be frozen."""
    last = history.last
    if last.preempted:
        vars(last.error)["preempted"] = last.preempted
    if history.count > 1:
        vars(last.error)["attempts"] = tuple(history.kept)
        first, *latest = [f"\n  {attempt}" for attempt in history.kept[:-1]]
        left_out = history.count - len(history.kept)
        gap = [f"\n  ... {counted(left_out, 'attempt')} left out ..."] if left_out else []
        add_note(
            last.error,
            f"This was attempt {last.number}, the last: {reason}. Earlier attempts:"
            f"{''.join([first, *gap, *latest])}",
        )


def values_of(job: Job, outcomes: list[Outcome]) -> list[Any]:
    """Load the requested values, or raise the first cause of failure."""
    try:
        failures = cause_first(outcome for outcome in outcomes if isinstance(outcome, Failure))
        if failures:
            raise_first(failures)
        values = {outcome.rank: outcome for outcome in outcomes if isinstance(outcome, Value)}
        wanted = range(job.num_processes) if job.keep_all else [0]
        if missing := [rank for rank in wanted if rank not in values]:
            raise DistributorError(
                f"Neither a value nor a failure was received from {listed('rank', missing)}."
            )
        return [_load(values[rank]) for rank in wanted]
    finally:
        for outcome in outcomes:
            if isinstance(outcome, Value):
                outcome.file.close()


def _load(value: Value) -> Any:
    try:
        return value.load()
    except Exception as error:
        raise DistributorError(
            f"Rank {value.rank} returned a value that cannot be unpickled here: {error!r}. "
            "The modules of its classes must be importable in this process too."
        ) from error
