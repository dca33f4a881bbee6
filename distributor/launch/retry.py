"""The one loop: launch, look at the outcomes, return the values, raise the failure or try again."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from distributor.core.telemetry import Reader, Reported, Told
from distributor.core.text import counted, listed
from distributor.errors import (
    DistributorError,
    NodeLost,
    RunCancelled,
    UnpicklableError,
    ValueTooLarge,
)
from distributor.launch.console import Console, notify
from distributor.launch.job import Job, Launcher, Listener
from distributor.launch.labels import Label
from distributor.launch.spark.user_modules import how_to_send
from distributor.launch.stack_requests import register_run
from distributor.node.agent.log_files import LogFiles
from distributor.serialization.outcome import (
    Failure,
    Outcome,
    Value,
    add_note,
    cause_first,
    raise_first,
)
from distributor.wire.messages import Source, Stream


@dataclass(frozen=True)
class Attempt:
    """An attempt that failed.

    Parameters
    ----------
    number : int
        Which it was, from 0.
    world_size : int
        On how many ranks.
    error : Exception
        What ended it; ``rank_failures`` has each rank's, where ranks failed.
    """

    number: int
    world_size: int
    error: Exception

    def __str__(self) -> str:
        what = str(self.error).strip().partition("\n")[0].rstrip(".")
        kind = type(self.error).__name__
        return f"attempt {self.number} on {counted(self.world_size, 'rank')}: {kind}: {what}"


def run(job: Job, launcher: Launcher) -> list[Any]:
    """Run a job, again where it fails and may, and give what its ranks returned.

    Returns
    -------
    list
        Rank 0's value alone, or every rank's in rank order where the job keeps all.

    Raises
    ------
    Exception
        What the failing rank raised last, with its ``rank_failures``, and as ``attempts`` all
        attempts where there were several.
    """
    audience = Audience(job.listeners)
    with Label(job.program.name) as label:
        return _run(job, launcher, audience, label)


def _run(job: Job, launcher: Launcher, audience: Audience, label: Label) -> list[Any]:
    failed: list[Attempt] = []
    while True:
        silent = getattr(failed[-1].error, "silent", ()) if failed else ()
        job = job.for_attempt(len(failed), silent)
        sized, count = launcher.resolve_size(job)
        try:
            values = _attempt(replace(job, num_processes=count), sized, audience, label)
        except Exception as error:
            job.preemption.between_attempts()
            failed.append(Attempt(len(failed), count, error))
            audience.hear_of_failure(job.attempt, error)
            end = _reason_to_end(failed, job.settings.max_failures, job.preemption.sigterm_received)
            if end is not None:
                _tell_of_attempts(failed, end)
                if job.preemption.sigterm_received:
                    # This process ends before it can show the error.
                    notify("".join(traceback.format_exception(error)))
                raise
            notify(f"Failed: {failed[-1]}. The next attempt begins.")
        else:
            notify(f"Finished {launcher.training.format(count)}")
            return values


def _attempt(job: Job, launcher: Launcher, audience: Audience, label: Label) -> list[Any]:
    audience.tell(lambda each: each.begins(job.attempt, job.num_processes))
    with DriverSink(job, audience, label) as sink:
        with register_run(job.run_id, job.inquiry):
            outcomes = launcher.launch(job, sink)
        # Not in a generator's context: it could not pass on an exception that is frozen.
        try:
            return values_of(job, outcomes)
        except ModuleNotFoundError as error:
            if hint := how_to_send(error, job.program):
                add_note(error, hint)
            raise


def _reason_to_end(failed: list[Attempt], max_failures: int, asked: bool) -> str | None:
    """Say why there is no further attempt; None where there is one."""
    if asked:
        return "this process is asked to end"
    last = failed[-1].error
    if not (isinstance(last, NodeLost) or _failure_of(last)) or isinstance(last, FOR_GOOD):
        return "another attempt would not help"
    if 0 <= max_failures < len(failed):
        return f"max_failures is {max_failures}"
    twins = [each.number for each in failed[:-1] if _is_same(each.error, last)]
    if twins:
        return f"attempt {twins[0]} failed at the same step in the same way"
    return None


def _is_same(one: Exception, other: Exception) -> bool:
    """Tell whether the user's code raised the same exception at the same step."""
    first, second = _failure_of(one), _failure_of(other)
    if first is None or second is None or first.step is None:
        return False
    return (first.summary, first.step) == (second.summary, second.step)


def _failure_of(error: Exception) -> Failure | None:
    """Give the first rank's failure that an error is made of."""
    failures: Mapping[int, Failure] = getattr(error, "rank_failures", {})
    return next(iter(failures.values()), None)


def _tell_of_attempts(failed: list[Attempt], end: str) -> None:
    """Hang all attempts on the error that is raised; the user's own exception may be frozen."""
    if len(failed) > 1:
        vars(failed[-1].error)["attempts"] = tuple(failed)
        earlier = "".join(f"\n  {attempt}" for attempt in failed[:-1])
        note = f"This was attempt {failed[-1].number}, the last: {end}. Before it:{earlier}"
        add_note(failed[-1].error, note)


FOR_GOOD = (UnpicklableError, ValueTooLarge)
"""What ranks raise once the training is over, and would again."""


def values_of(job: Job, outcomes: list[Outcome]) -> list[Any]:
    """Load the values that were asked for, or raise the first cause of failure."""
    try:
        failures = cause_first(outcome for outcome in outcomes if isinstance(outcome, Failure))
        if failures:
            raise_first(failures)
        values = {outcome.rank: outcome for outcome in outcomes if isinstance(outcome, Value)}
        wanted = range(job.num_processes) if job.keep_all else [0]
        if missing := [rank for rank in wanted if rank not in values]:
            raise DistributorError(
                f"No outcome came from {listed('rank', missing)}, and no failure."
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
            f"Rank {value.rank} returned a value that cannot be loaded here: {error!r}. "
            "What it is made of must be importable in this process too."
        ) from error


class Audience:
    """A run's listeners, until one of them raises: that ends the run, of which no more is heard."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def tell(self, what: Callable[[Listener], object]) -> None:
        """Tell each of them something."""
        listeners, self._listeners = self._listeners, ()
        for listener in listeners:
            what(listener)
        self._listeners = listeners

    def hear_of_failure(self, attempt: int, error: Exception) -> None:
        """Tell each of an attempt that failed; one that was cancelled did not."""
        if not isinstance(error, RunCancelled):
            self.tell(lambda each: each.failed(attempt, error))


class DriverSink:
    """Shows the ranks' output here, keeps all of it under ``log_dir``, and tells who listens."""

    def __init__(self, job: Job, audience: Audience, label: Label) -> None:
        log_dir, standing = job.settings.log_dir, job.standing
        self._console = Console(
            job.settings.shows,
            prefix=label.prefix,
            headline=lambda: standing.line(label.name, job.num_processes),
            reported=lambda: standing.told,
        )
        self._files = LogFiles(log_dir, job.run_id, job.attempt) if log_dir is not None else None
        self._failures = job.failures
        self._standing = standing
        self._audience = audience
        self._preemption = job.preemption
        self._readers: defaultdict[tuple[int, Source], Reader] = defaultdict(Reader)

    def __enter__(self) -> DriverSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._note_failures(getattr(error, "rank_failures", {}))
        finally:
            self._console.close()
            if self._files:
                self._files.close()

    def _note_failures(self, raised: Mapping[int, Failure]) -> None:
        """Treat a rank's traceback as printed; it is shown here unless the error raised has it."""
        noted = {failure.origin.rank: failure for failure in self._failures} | dict(raised)
        for rank, failure in noted.items():
            if failure.step is not None:  # a rank that died instead has printed all it had to say
                self._take(rank, "stderr", failure.text.encode(), show=not raised)

    def write(self, rank: int, source: Source, data: bytes) -> None:
        if source == "stdout" or source == "stderr":
            self._take(rank, source, data)
        else:
            for told in self._readers[rank, source].take(data):
                self._note(rank, source, told)

    def _take(self, rank: int, stream: Stream, data: bytes, *, show: bool = True) -> None:
        if show:
            self._console.write(rank, stream, data)
        if self._files:
            self._files.write(rank, stream, data)
        self._audience.tell(lambda each: each.printed(rank, stream, data))

    def _note(self, rank: int, source: Source, told: Told) -> None:
        if isinstance(told, Reported):
            self._audience.tell(lambda each: each.reported(told))
            if told.preempted and told.checkpoint is not None:
                self._preemption.saved()
        elif source == "progress":
            if rank == 0:
                self._standing.note(told)
            self._audience.tell(lambda each: each.progressed(rank, told))
        else:
            self._audience.tell(lambda each: each.used(told))

    def has_room(self) -> bool:
        self._console.tick()
        self._preemption.advance()
        return True
