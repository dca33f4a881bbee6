"""Runs the attempts of a run: launches, returns the values, and retries or raises."""

from __future__ import annotations

import itertools
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from distributor.control.controller import Controller
from distributor.control.listeners import Listeners
from distributor.control.run import Attempt, Launcher, Resized, Run
from distributor.control.sink import DriverSink
from distributor.control.stack_requests import register_run
from distributor.core.text import counted, duration, listed
from distributor.errors import DistributorError
from distributor.policies.retry_policy import (
    LONG_ATTEMPT,
    FailedAttempt,
    is_preemption,
    pause_before_next,
    reason_to_stop,
)
from distributor.screen.messages import notify, warn
from distributor.serialization.outcome import (
    Failure,
    Outcome,
    Value,
    add_note,
    cause_first,
    raise_first,
)

LINES_OF_ONE_MODEL = """
    torch.distributed.init_process_group()
    model = torch.nn.parallel.DistributedDataParallel(model)"""


def run_attempts(run: Run, launcher: Launcher) -> list[Any]:
    """Run attempts until one succeeds, and return its ranks' values."""
    spec, data = run.spec, run.datasets
    opened: AbstractContextManager[None] = nullcontext()
    if data is not None:
        opened = data.opened(spec.run_id, run.call_site, spec.settings.pool, run.cancellation)
    began = time.monotonic()
    listeners = Listeners(run.listeners, launcher.thread)
    with listeners, launcher.opened(run) as launcher, opened:
        try:
            attempt, values = _first_success(run, launcher, listeners)
        except Exception as error:
            _explain_end(run, error)
            raise
        seconds = duration(time.monotonic() - began)
        message = f"Finished {launcher.training(attempt.num_ranks)} in {seconds}"
        run.notify(message, spec.settings.spelling.logger)
        _warn_about_separate_models(attempt)
        return values


def _first_success(run: Run, launcher: Launcher, listeners: Listeners) -> tuple[Attempt, list[Any]]:
    """Run attempts until one succeeds; return it, and its ranks' values."""
    silent: tuple[str, ...] = ()
    for number in itertools.count():
        began = time.monotonic()
        count = launcher.capacity(run, silent)
        if run.datasets is not None:
            run.datasets.check(count)
        attempt = Attempt(run=run, number=number, num_ranks=count)
        try:
            return attempt, _run_attempt(attempt, launcher, listeners)
        except Resized as resized:
            run.notify(str(resized))
            run.graceful_shutdown.end_attempt()
            continue
        except Exception as error:
            _note_failure(attempt, error, time.monotonic() - began)
            run.graceful_shutdown.end_attempt()
            listeners.attempt_failed(number, error)
            if _reason_to_stop(run):
                raise
            silent = attempt.silent
        _announce_next(run)
    raise AssertionError("there are always further numbers")


def _run_attempt(attempt: Attempt, launcher: Launcher, listeners: Listeners) -> list[Any]:
    listeners.call(lambda listener: listener.begins(attempt.number, attempt.num_ranks))
    with DriverSink(attempt, listeners) as sink:
        with register_run(attempt.spec.run_id, attempt.stack_requests):
            outcomes = _follow(attempt, launcher, sink)
        # Outside register_run, because a generator's context cannot pass on a frozen exception.
        try:
            return _values_of(attempt, outcomes)
        except (ModuleNotFoundError, OSError, KeyError) as error:
            data = attempt.run.datasets
            if hint := launcher.hint(error, attempt.spec) or (data and data.hint(error)):
                add_note(error, hint)
            raise


def _follow(attempt: Attempt, launcher: Launcher, sink: DriverSink) -> list[Outcome]:
    deadline = time.monotonic() + attempt.settings.start_timeout
    with launcher.start(attempt, deadline) as handle:
        attempt.announce()
        return Controller(attempt, handle, sink, deadline).follow()


def _note_failure(attempt: Attempt, error: Exception, seconds: float) -> None:
    is_preempted = is_preemption(error, attempt.cause, attempt.preempted, attempt.silent)
    preempted = attempt.preempted if is_preempted else {}
    attempt.run.failed.add(
        FailedAttempt(attempt.number, attempt.num_ranks, error, preempted),
        attempt.cause,
        is_quick=seconds < LONG_ATTEMPT and not attempt.progress.checkpoints,
    )


def _reason_to_stop(run: Run) -> str | None:
    if run.graceful_shutdown.sigterm_received:
        return "this process received SIGTERM"
    settings = run.spec.settings
    return reason_to_stop(run.failed, settings.max_failures, settings.max_preemption_failures)


def _explain_end(run: Run, error: Exception) -> None:
    """Add the attempts to the error that is raised. The user's own exception may be frozen."""
    failed = run.failed
    if not failed.count:
        return
    earlier, text = failed.kept, "Earlier attempts:"
    if failed.last.error is error:  # none if the error was raised before the next attempt
        earlier = failed.kept[:-1]
        text = f"This was attempt {failed.last.number}, the last: {_reason_to_stop(run)}. {text}"
        if failed.last.preempted:
            vars(error)["preempted"] = failed.last.preempted
    if earlier:
        vars(error)["attempts"] = tuple(failed.kept)
        first, *latest = [f"\n  {attempt}" for attempt in earlier]
        left_out = failed.count - len(failed.kept)
        gap = [f"\n  ... {counted(left_out, 'attempt')} left out ..."] if left_out else []
        add_note(error, "".join([text, first, *gap, *latest]))
    if run.spec.logs is not None:
        add_note(error, f"The output of all ranks is in {run.spec.logs}.")
    if run.graceful_shutdown.sigterm_received:
        # This process ends before it can show the error.
        notify("".join(traceback.format_exception(error)))


def _announce_next(run: Run) -> None:
    """Show why there is another attempt, and pause before it."""
    failed = run.failed
    seconds = pause_before_next(failed.num_quick, run.spec.run_id)
    in_seconds = f" in {seconds:.1f} s" if seconds else ""
    cause = f"\n{failed.cause}" if failed.cause else ""
    run.notify(f"Failed: {failed.last}. Starting the next attempt{in_seconds}.{cause}")
    if failed.num_same:
        warn(
            f"Attempt {failed.last.number} failed at the same step in the same way as "
            f"{counted(failed.num_same, 'earlier attempt')}."
        )
    if seconds:
        run.cancellation.pause(seconds)


def _warn_about_separate_models(attempt: Attempt) -> None:
    """Warn if ranks have trained models of their own, of which the value of one is returned."""
    trained = attempt.trained
    if attempt.spec.keep_all or len(trained) < 2 or any(trained.values()):
        return
    warn(
        f"An optimizer made steps in {listed('rank', sorted(trained))}, but none of them has had a "
        "process group: each has trained a model of its own, and the value of rank 0 is returned "
        f"(run_all returns all). To train one model on all ranks, add:{LINES_OF_ONE_MODEL}"
    )


def _values_of(attempt: Attempt, outcomes: list[Outcome]) -> list[Any]:
    """Load the requested values, or raise the first cause of failure."""
    try:
        failed = (outcome for outcome in outcomes if isinstance(outcome, Failure))
        attempt.raised = cause_first(failed)
        if attempt.raised:
            raise_first(attempt.raised)
        values = {outcome.rank: outcome for outcome in outcomes if isinstance(outcome, Value)}
        wanted = range(attempt.num_ranks) if attempt.spec.keep_all else [0]
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
