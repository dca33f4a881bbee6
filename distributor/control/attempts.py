"""Runs the attempts of a run: launches, returns the values, and retries or raises."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import traceback
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from distributor.control.controller import Controller
from distributor.control.run import Attempt, Launcher, Resized, Run, register_run
from distributor.control.sink import DriverSink, Listeners
from distributor.core.cell_errors import shorten_in_cell
from distributor.core.text import counted, duration, listed
from distributor.errors import DistributorError
from distributor.policies import (
    LONG_ATTEMPT,
    FailedAttempt,
    FailedAttempts,
    is_preemption,
    pause_before_next,
    reason_to_stop,
)
from distributor.run_spec import RunSpec
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


def execute(run: Run) -> Any:
    """Run attempts until one succeeds, and return the value of its rank 0, or those of all ranks.

    An error that says what has happened is raised without the frames of this package.
    """
    handled = sys.exc_info()[1]  # by the caller
    recorded: AbstractContextManager[object] = run.recorder or nullcontext()
    try:
        with run.label, run.block, run.folder, run.graceful_shutdown, recorded, run.events:
            _announce_resumption(run)
            listeners = Listeners(run.listeners, run.launcher.thread)
            with listeners, run.launcher.opened(run) as launcher, _datasets_opened(run):
                try:
                    return _run_attempts(run, launcher, listeners)
                except Exception as error:
                    _explain_end(run, error)
                    _show_verdict(run, but="healthy")
                    raise
    except BaseException as error:
        if run.recorder:
            run.recorder.end(error)  # unless it has: the run may have failed before it began
        raise _for_caller(error, handled, run.spec)  # noqa: B904, as it is the same, or its context


def _run_attempts(run: Run, launcher: Launcher, listeners: Listeners) -> Any:
    began = time.monotonic()
    silent: tuple[str, ...] = ()
    for number in itertools.count():
        attempt = _next_attempt(run, launcher, number, silent)
        attempt_began = time.monotonic()
        listeners.attempt_begins(number, attempt.num_ranks)
        run.events.begin_attempt(number, attempt.num_ranks)
        deadline = attempt_began + run.spec.settings.start_timeout
        try:
            with DriverSink(attempt, listeners) as sink:
                with (
                    register_run(run.spec.run_id, attempt.stack_requests),
                    launcher.start(attempt, deadline) as handle,
                ):
                    outcomes = Controller(attempt, handle, sink, deadline).follow()
                values = _values_of(attempt, launcher, outcomes)
            run.events.end_attempt()
            break
        except Resized as resized:
            run.notify(str(resized))
            run.events.end_attempt(state="resized")
            run.graceful_shutdown.end_attempt()
        except Exception as error:
            _note_failure(attempt, error, time.monotonic() - attempt_began)
            run.events.end_attempt(error)
            run.graceful_shutdown.end_attempt()
            listeners.attempt_failed(number, error)
            if _reason_to_stop(run):
                raise
            silent = attempt.silent
            _announce_next(run)
    seconds = duration(time.monotonic() - began)
    message = f"Finished {launcher.training(len(attempt.numbers))} in {seconds}"
    run.notify(message, run.spec.settings.spelling.logger)
    _warn_about_lost_ranks(attempt)
    _warn_about_separate_models(attempt)
    _show_verdict(run)
    return values if run.spec.keep_all else values[0]


def _announce_resumption(run: Run) -> None:
    with contextlib.suppress(Exception):  # only the ranks may reach the storage
        if message := run.resumption():
            run.notify(message)


def _show_verdict(run: Run, but: str = "") -> None:
    verdict = run.events.verdict
    if run.has_status and verdict is not None and verdict.verdict != but:
        run.block.verdict = verdict
        run.notify(str(verdict))


def _datasets_opened(run: Run) -> AbstractContextManager[None]:
    if run.datasets is None:
        return nullcontext()
    pool = run.spec.settings.pool
    return run.datasets.opened(run.spec.run_id, run.call_site, pool, run.cancellation)


def _next_attempt(run: Run, launcher: Launcher, number: int, silent: Collection[str]) -> Attempt:
    count = launcher.capacity(run, silent)
    if run.datasets is not None:
        run.datasets.check(count)
    return Attempt(run=run, number=number, num_ranks=count)


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
    if not run.failed.count:
        return
    _add_attempts(run.failed, _reason_to_stop(run), error)
    if run.spec.logs is not None:
        add_note(error, f"The output of all ranks is in {run.spec.logs}.")
    if run.graceful_shutdown.sigterm_received:
        # This process ends before it can show the error.
        notify("".join(traceback.format_exception(error)))


def _add_attempts(failed: FailedAttempts, reason: str | None, error: Exception) -> None:
    earlier, last = failed.kept, ""
    if failed.last.error is error:  # not if the next attempt has not begun
        earlier = failed.kept[:-1]
        last = f"This was attempt {failed.last.number}, the last: {reason}. "
        if failed.last.preempted:
            vars(error)["preempted"] = failed.last.preempted
    if survived := failed.num_survived:
        last += f"Survived before: {counted(survived, 'loss', 'losses')}. "
    if earlier:
        vars(error)["attempts"] = tuple(failed.kept)
        first, *latest = [f"\n  {attempt}" for attempt in earlier]
        left_out = failed.count - len(failed.kept)
        gap = [f"\n  ... {counted(left_out, 'attempt')} left out ..."] if left_out else []
        add_note(error, "".join([last, "Earlier attempts:", first, *gap, *latest]))
    elif survived:
        add_note(error, last.rstrip())


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


def _warn_about_lost_ranks(attempt: Attempt) -> None:
    if lost := attempt.survived:
        each = "".join(f"\n  {failure.origin}: {failure.summary}" for failure in lost)
        warn(f"The run went on without {counted(len(lost), 'rank')} that it lost:{each}")


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


def _values_of(attempt: Attempt, launcher: Launcher, outcomes: list[Outcome]) -> list[Any]:
    """Load the requested values, or raise the first cause of failure."""
    try:
        failed = (outcome for outcome in outcomes if isinstance(outcome, Failure))
        attempt.raised = cause_first(failed)
        if attempt.raised:
            raise_first(attempt.raised)
        values = {outcome.rank: outcome for outcome in outcomes if isinstance(outcome, Value)}
        wanted = attempt.numbers if attempt.spec.keep_all else attempt.numbers[:1]
        if missing := [rank for rank in wanted if rank not in values]:
            raise DistributorError(
                f"Neither a value nor a failure was received from {listed('rank', missing)}."
            )
        return [_load(values[rank]) for rank in wanted]
    except (ModuleNotFoundError, OSError, KeyError) as error:
        data = attempt.run.datasets
        if hint := launcher.hint(error, attempt.spec) or (data and data.hint(error)):
            add_note(error, hint)
        raise
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


def _for_caller(
    error: BaseException, handled: BaseException | None, spec: RunSpec
) -> BaseException:
    """Return what the caller of the run gets in place of an error.

    That is an interrupt if it has led to the error: a call of Spark may break. An error that says
    what happened has no frames of the launcher, which do not help the user.
    """
    if interrupt := _interrupt_behind(error, handled):
        ended = f"the run of {spec.program.name} has ended, and no rank is left"
        interrupt.args = interrupt.args or (ended,)
        interrupt.__suppress_context__ = True
        shorten_in_cell(interrupt)
        return interrupt
    error = spec.settings.spelling.own(error)
    shorten_in_cell(error)
    is_explained = isinstance(error, DistributorError) or hasattr(error, "rank_failures")
    if isinstance(error, Exception) and is_explained:
        BaseException.with_traceback(error, None)
    return error


def _interrupt_behind(
    error: BaseException | None, handled: BaseException | None
) -> KeyboardInterrupt | None:
    """Return the interrupt that an error is, or that has led to it.

    The error that the caller handles is in the context of all others, and has not led to them.
    """
    while error is not None and error is not handled:
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__context__
    return None
