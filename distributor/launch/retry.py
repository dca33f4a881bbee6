"""Runs a job's attempts: launches, returns the values, and retries or raises after a failure."""

from __future__ import annotations

import traceback
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
from distributor.launch.spark.user_modules import how_to_send
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
        there were several attempts, ``attempts`` has all of them.
    """
    listeners = Listeners(job.listeners)
    with _opened_datasets(job):
        return _run_attempts(job, launcher, listeners)


def _opened_datasets(job: Job) -> AbstractContextManager[None]:
    if job.datasets is None:
        return nullcontext()
    return job.datasets.opened(job.run_id, job.call_site, job.settings.pool, job.cancellation)


def _run_attempts(job: Job, launcher: Launcher, listeners: Listeners) -> list[Any]:
    failed: list[FailedAttempt] = []
    while True:
        silent = getattr(failed[-1].error, "silent", ()) if failed else ()
        job = job.for_attempt(len(failed), silent)
        resized_launcher, count = launcher.resolve_size(job)
        if job.datasets is not None:
            job.datasets.check(count)
        try:
            sized = replace(job, num_processes=count)
            values = _run_attempt(sized, resized_launcher, listeners)
        except Exception as error:
            job.graceful_shutdown.end_attempt()
            preempted = job.preempted if _is_preemption(error, job.preempted) else {}
            failed.append(FailedAttempt(len(failed), count, error, preempted))
            listeners.attempt_failed(job.attempt, error)
            sigterm_received = job.graceful_shutdown.sigterm_received
            reason = _reason_to_stop(failed, job.settings, sigterm_received)
            if reason is not None:
                _add_attempts(failed, reason)
                if job.logs is not None:
                    add_note(error, f"The output of all ranks is in {job.logs}.")
                if sigterm_received:
                    # This process ends before it can show the error.
                    notify("".join(traceback.format_exception(error)))
                raise
            job.notify(f"Failed: {failed[-1]}. Starting the next attempt.")
            if same := _same_failures(failed):
                warn(
                    f"Attempt {failed[-1].number} failed at the same step in the same way as "
                    f"{counted(same, 'earlier attempt')}."
                )
        else:
            job.notify(f"Finished {launcher.training(count)}", job.settings.spelling.logger)
            return values


def _run_attempt(job: Job, launcher: Launcher, listeners: Listeners) -> list[Any]:
    listeners.call(lambda listener: listener.begins(job.attempt, job.num_processes))
    with DriverSink(job, listeners) as sink:
        with register_run(job.run_id, job.stack_requests):
            outcomes = launcher.launch(job, sink)
        # Outside register_run, because a generator's context cannot pass on a frozen exception.
        try:
            return values_of(job, outcomes)
        except ModuleNotFoundError as error:
            if hint := how_to_send(error, job.program):
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


def _reason_to_stop(
    failed: list[FailedAttempt], settings: Settings, sigterm_received: bool
) -> str | None:
    """Return why there is no further attempt; None if there is one."""
    if sigterm_received:
        return "this process received SIGTERM"
    last = failed[-1].error
    is_retried = isinstance(last, (NodeLost, RunStalled)) or _first_failure(last) is not None
    if not is_retried or isinstance(last, NOT_RETRIED):
        return "another attempt would not help"
    name, count = _limiting(failed, settings)
    limit = getattr(settings, name)
    return f"{name} is {limit}" if 0 <= limit < count else None


def _limiting(failed: list[FailedAttempt], settings: Settings) -> tuple[str, int]:
    """Return the setting that limits failures like the last, and how many of them there are."""
    if settings.max_preemption_failures is None:
        return "max_failures", len(failed)
    num_preempted = sum(1 for attempt in failed if attempt.preempted)
    if failed[-1].preempted:
        return "max_preemption_failures", num_preempted
    return "max_failures", len(failed) - num_preempted


def _same_failures(failed: list[FailedAttempt]) -> int:
    """Return how many of the earlier attempts failed as the last one did."""
    *earlier, last = failed
    return sum(1 for each in earlier if _is_same(each.error, last.error))


def _is_same(one: Exception, other: Exception) -> bool:
    """Return whether the user's code raised the same exception at the same step."""
    first, second = _first_failure(one), _first_failure(other)
    if first is None or second is None or first.step is None:
        return False
    return (first.summary, first.step) == (second.summary, second.step)


def _first_failure(error: Exception) -> Failure | None:
    """Return the failure of the rank that caused an error, if a rank did."""
    failures: Mapping[int, Failure] = getattr(error, "rank_failures", {})
    return next(iter(failures.values()), None)


def _add_attempts(failed: list[FailedAttempt], reason: str) -> None:
    """Add all attempts to the error that is raised. The user's own exception may be frozen."""
    if failed[-1].preempted:
        vars(failed[-1].error)["preempted"] = failed[-1].preempted
    if len(failed) > 1:
        vars(failed[-1].error)["attempts"] = tuple(failed)
        earlier = "".join(f"\n  {attempt}" for attempt in failed[:-1])
        add_note(
            failed[-1].error,
            f"This was attempt {failed[-1].number}, the last: {reason}. Earlier attempts:{earlier}",
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
