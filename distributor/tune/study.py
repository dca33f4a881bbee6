"""`optimize`: asks Optuna's study for trials, runs them beside each other, and records the results.

One thread, the caller's, uses the study. The threads of runs put events into its queue.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from distributor._compat.optuna import is_stopped, optimize_loop
from distributor.control.future import RunFuture, start_run
from distributor.control.run import Run
from distributor.control.waiting import interruptible
from distributor.core.cell_errors import ends_at_caller
from distributor.core.text import Redaction, counted
from distributor.core.threads import MessageQueue
from distributor.errors import RunCancelled, StartTimeout
from distributor.rank.messages import Reported
from distributor.screen.messages import RunLabel, notify, shown_from, warn
from distributor.settings import Listener, check_count, check_timeout
from distributor.tune.block import StudyBlock, shown
from distributor.tune.drivers import Driver, earlier_values
from distributor.tune.objective import Objective
from distributor.tune.room import Place, Room
from distributor.tune.sharing import StudyDatasets, StudyTracking
from distributor.tune.trials import Arguments, Job, job_of

MAX_EVENTS = 100
"""Events after which the study looks after other things."""
TICK = 0.5
"""Seconds between two looks at what no event says: the room, dead drivers, the time left."""
ERROR, MAX_ERROR = "distributor:error", 2000
"""The attribute of a trial that has failed, and its characters at most."""
Callback = Callable[[optuna.Study, FrozenTrial], object]


@ends_at_caller
@interruptible
def optimize(
    study: optuna.Study,
    train: Any,
    space: Callable[[Trial], Arguments],
    distributor: Any = None,
    *,
    n_trials: int | None = None,
    timeout: float | None = None,
    metric: str | Sequence[str] | None = None,
    reduce: Literal["last", "min", "max"] = "last",
    n_jobs: int | None = None,
    catch: type[Exception] | Iterable[type[Exception]] = (),
    callbacks: Iterable[Callback] | None = None,
) -> None:
    """Run the trials of a study of Optuna, each as a run of its own.

    As many trials run at once as there is room for. The ranks need neither Optuna nor access to the
    study's storage. Attributes of each trial say which driver runs it, so that another call for the
    same study, even on another machine, repeats the trials of a driver that was killed.

    Follows `optuna.study.Study.optimize
    <https://optuna.readthedocs.io/en/stable/reference/generated/optuna.study.Study.html>`_.

    Parameters
    ----------
    study : optuna.Study
        The study, with any sampler, pruner, storage and directions.
    train : callable, TorchTrainer or @distributed function
        What each trial runs. It is pickled once, by this call. A `functools.partial` binds
        arguments that all trials share, such as a DataFrame, which is then computed once.
    space : callable
        Returns the arguments of `train` for a trial, which it asks for values, on the driver: a
        dict of keyword arguments, or a tuple of positional ones. For a `TorchTrainer` it is a dict
        that is merged into ``train_loop_config``.
    distributor : TorchDistributor, optional
        Runs `train` if that is a function, and only then. Its settings hold for each trial:
        ``max_failures`` too. A pair of numbers of ranks takes what there is room for.
    n_trials : int, optional
        The number of trials of this call. Without it and `timeout` there is no limit.
    timeout : float, optional
        Seconds after which no further trial begins.
    metric : str or sequence of str, optional
        The metric of ``distributor.train.report`` that rank 0's reports have, or one for each
        direction of the study. Its values are reported to the trial, the n-th with step n, and a
        trial that the study's pruner ends is cancelled. By default the result of a trial is the
        value that rank 0 returns.
    reduce : "last", "min" or "max", default "last"
        Which of the values of `metric` is the trial's.
    n_jobs : int, optional
        The largest number of trials at once. By default, and if it is -1, as many as there is room
        for, or one through Spark Connect, which does not report it; Optuna's default is one.
    catch : type or sequence of types, optional
        Exceptions of trials with which the study goes on. Those of ranks and of `space` count.
    callbacks : sequence of callables, optional
        Called with the study and a trial after the trial's end, in this thread.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or `space` returns what `train` does not take.
    DistributorError
        If there can never be slots for a trial.
    RuntimeError
        If a callback of the study calls this.
    Exception
        The first exception of a trial that `catch` does not name. The other trials are cancelled,
        and recorded as failed.

    Examples
    --------
    >>> def train(lr):
    ...     return (lr - 0.1) ** 2
    >>> def space(trial):
    ...     return {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True)}
    >>> study = optuna.create_study()
    >>> optimize(study, train, space, TorchDistributor(2, use_gpu=False), n_trials=3)
    >>> len(study.trials)
    3
    """
    if not isinstance(study, optuna.Study):
        raise TypeError(
            f"study must be a study of Optuna, such as optuna.create_study(), but is {study!r}."
        )
    objective = Objective.of(study, metric, reduce)
    job = job_of(train, distributor)
    objective.check_storage(job.distributor)
    if not callable(space):
        raise TypeError(f"space must be a function of a trial, but is {space!r}.")
    if n_trials not in (None, 0):
        check_count("n_trials", n_trials)
    check_timeout("timeout", timeout)
    n_jobs = None if n_jobs in (None, -1) else check_count("n_jobs", n_jobs)
    caught = tuple(catch) if isinstance(catch, Iterable) else (catch,)
    if not all(isinstance(each, type) and issubclass(each, Exception) for each in caught):
        raise TypeError(f"catch must be a type of exceptions, or several, but is {catch!r}.")
    called = tuple(callbacks) if isinstance(callbacks, Iterable) else callbacks or ()
    if not (isinstance(called, tuple) and all(map(callable, called))):
        raise TypeError(
            f"callbacks must be functions of a study and a trial, but is {callbacks!r}."
        )
    room = Room(job.distributor, n_jobs)
    block = StudyBlock(study.study_name, n_trials, timeout)
    with optimize_loop(study):
        _Loop(study, objective, job, space, room, block, caught, called).run(
            math.inf if n_trials is None else n_trials,
            math.inf if timeout is None else time.monotonic() + timeout,
        )


class _Reports(Listener):
    """Passes on the reports of a trial's run."""

    def __init__(self, pass_on: Callable[[Reported], object]) -> None:
        self._pass_on = pass_on

    def reported(self, report: Reported) -> None:
        self._pass_on(report)


@dataclass(eq=False)
class _Running:
    """A trial that runs, or waits to be run again."""

    trial: Trial
    name: str
    arguments: Arguments = ()
    place: Place | None = None
    future: RunFuture[Any] | None = None
    values: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """What was reported, by the number of the report."""
    last_step: int = 0
    is_pruned: bool = False
    began: float = 0.0

    @property
    def run(self) -> Run:
        assert self.place is not None
        assert self.place.run is not None
        return self.place.run


@dataclass(eq=False)
class _Loop:
    study: optuna.Study
    objective: Objective
    job: Job
    space: Callable[[Trial], Arguments]
    room: Room
    block: StudyBlock
    caught: tuple[type[Exception], ...]
    callbacks: tuple[Callback, ...]

    def __post_init__(self) -> None:
        self._events: MessageQueue[Callable[[], object]] = MessageQueue()
        self._running: dict[int, _Running] = {}
        self._again: deque[_Running] = deque()
        self._is_full = False
        self._driver = Driver(self.study)
        self._datasets = StudyDatasets(self.job)
        self._tracking = StudyTracking(self.study.study_name, self.objective.keys)

    def run(self, n_trials: float, deadline: float) -> None:
        """Run trials until so many have been started, or the deadline has passed, and all ended."""
        self._left, self._deadline = n_trials, deadline
        with self.block, self._tracking, self._datasets, self._driver:
            self._show_best()
            try:
                while self._start_trials() or self._running:
                    self._handle_events()
                    self.block.tick()
            except BaseException:
                self._end_all()
                raise

    # Starting trials

    def _start_trials(self) -> bool:
        """Start trials as long as there is room; return whether more are to be started."""
        for number in self._driver.repeat_trials_of_dead():
            when = "now" if self._num_left else "by the next call of optimize"
            notify(f"Trial {number} was run by a driver that has died: it is run again {when}.")
        while (left := self._num_left) and not self._is_full and (place := self.room.take(left)):
            try:
                running = self._again.popleft() if self._again else self._ask()
                if running is not None:
                    self._submit(running, place)
            finally:
                if not place.run:
                    self.room.give_back(place)
        return self._num_left > 0

    @property
    def _num_left(self) -> float:
        if is_stopped(self.study) or time.monotonic() >= self._deadline:
            return len(self._again)
        return self._left + len(self._again)

    def _ask(self) -> _Running | None:
        """Ask the study for a trial, and the user's function for the arguments of its run."""
        self._left -= 1
        trial = self.study.ask()
        name = self._driver.begin(trial)
        running = _Running(trial, name)
        try:
            running.arguments = self.space(trial)
        except optuna.TrialPruned:
            self._finish(running, state=TrialState.PRUNED)
        except BaseException as error:
            self._fail(running, error)
        else:
            return running
        return None

    def _submit(self, running: _Running, place: Place) -> None:
        number = running.trial.number
        try:
            if not isinstance(running.arguments, (dict, tuple)):
                raise TypeError(
                    "space must return a dict of keyword arguments or a tuple of positional ones, "
                    f"but has returned {running.arguments!r}."
                )
            # The study shows its trials.
            with shown_from(logging.WARNING):
                ranks = self.room.num_processes(place)
                tracked = self._tracking.opener(running.trial)
                run = self.job.prepare(running.arguments, running.name, ranks, tracked)
                run.label, run.has_status = RunLabel(f"trial {number}", is_needed=True), False
                run.listeners = (*run.listeners, _Reports(partial(self._receive, running, run)))
                self._datasets.share(run)
        except BaseException as error:
            self._finish(running, state=TrialState.FAIL, error=error)
            raise
        self.room.enter(place, run)
        running.place, running.began = place, time.monotonic()
        self._running[number] = running
        self.block.counts["running"] += 1
        with shown_from(logging.WARNING):
            running.future = start_run(run)
        running.future.add_done_callback(lambda _: self._put(self._end, running))

    def _put(self, handle: Callable[..., object], running: _Running, *args: Any) -> None:
        """Have this driver's thread handle an event of a trial that runs."""
        self._events.put(partial(handle, running, *args))

    # What trials report, and how they end

    def _receive(self, running: _Running, run: Run, report: Reported) -> None:
        """Receive a report, on a thread of the run."""
        if values := self.objective.values_in(report.metrics[0]):
            self._tracking.record(run, values, report.number)
            self._put(self._note_report, running, report.number, values)

    def _handle_events(self) -> None:
        with suppress(queue.Empty):
            self._events.get(TICK)()
            for _ in range(MAX_EVENTS):
                self._events.get(0)()

    def _note_report(self, running: _Running, step: int, values: tuple[float, ...]) -> None:
        if running.is_pruned or running.trial.number not in self._running:
            return
        try:
            if not running.values:
                running.values.update(earlier_values(self.study, running.trial, step))
            is_new = step > running.last_step
            running.last_step = max(running.last_step, step)
            # A further attempt repeats steps, and its values count.
            running.values = {s: v for s, v in running.values.items() if s < step} | {step: values}
            if len(values) > 1 or not is_new:  # Optuna does not prune by several values
                return
            running.trial.report(values[0], step)
            running.is_pruned = running.trial.should_prune()
        except optuna.exceptions.UpdateFinishedTrialError:  # somebody else has ended the trial
            running.is_pruned = True
        if running.is_pruned:
            running.run.cancellation.request()

    def _end(self, running: _Running) -> None:
        del self._running[running.trial.number]
        self.block.counts["running"] -= 1
        assert running.place is not None
        assert running.future is not None
        self.room.give_back(running.place)
        self._datasets.end(running.run)
        self._is_full = False
        try:
            value = running.future.result()
            if not running.values:  # the trial that it repeats may have made the last report
                running.values.update(earlier_values(self.study, running.trial, math.inf))
            values = self.objective.result(running.trial, running.values, value)
        except BaseException as error:
            if running.is_pruned or isinstance(error, optuna.TrialPruned):
                self._finish(running, state=TrialState.PRUNED)
            elif isinstance(error, StartTimeout) and self._running:
                # There is less room than it seemed: others use it.
                self._again.append(running)
                self._is_full = True
            else:
                self._fail(running, error)
        else:
            state = TrialState.PRUNED if running.is_pruned else None
            self._finish(running, None if state else values, state)

    def _fail(self, running: _Running, error: BaseException) -> None:
        self._finish(running, state=TrialState.FAIL, error=error)
        if not isinstance(error, self.caught):
            raise error
        failures = getattr(error, "rank_failures", {})
        texts = [failure.text for failure in failures.values()] or [repr(error)]
        warn(f"Trial {running.trial.number} failed. The study goes on, as catch says.\n{texts[0]}")

    def _finish(
        self,
        running: _Running,
        values: Sequence[float] | None = None,
        state: TrialState | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Record in the study how a trial has ended, and call the callbacks."""
        trial, seconds = running.trial, time.monotonic() - running.began
        if error is not None:
            text = Redaction(self.job.distributor.env).of_text(f"{type(error).__name__}: {error}")
            with suppress(optuna.exceptions.UpdateFinishedTrialError):
                trial.set_user_attr(ERROR, text[:MAX_ERROR])
        finished = self.study.tell(trial, values, state, skip_if_finished=True)
        self._driver.end(trial)
        self._tracking.end(finished)
        name = "failed" if finished.state is TrialState.FAIL else finished.state.name.lower()
        self.block.counts[name] += 1
        if finished.state is TrialState.COMPLETE:
            self._show_best()
        if running.future and error is None:
            parts = [f"{value:.6g}" for value in finished.values or ()]
            parts += [shown(finished.params), f"{seconds:.1f} s"]
            if (count := len(running.future.attempts)) and not running.is_pruned:
                parts.append(counted(count, "failed attempt"))
            notify(f"Trial {trial.number} {name}: {'; '.join(parts)}")
        if error is None or isinstance(error, self.caught):
            for callback in self.callbacks:
                callback(self.study, finished)

    def _show_best(self) -> None:
        # No trial is complete, or there are several directions.
        with suppress(ValueError, RuntimeError):
            best = self.study.best_trial
            self.block.best = f"{best.value:.6g} (trial {best.number}: {shown(best.params)})"

    def _end_all(self) -> None:
        """Cancel all trials, and record them as failed."""
        self._datasets.cancellation.request()
        for running in self._running.values():
            with suppress(Exception):  # of Spark
                running.run.cancellation.request()
        error = RunCancelled("The study has ended.")
        for running in [*self._running.values(), *self._again]:
            with suppress(Exception):  # the storage may have failed; the first error is raised
                if running.future is not None and not running.future.cancel():
                    running.future.exception(0)  # or it would be shown when Python exits
            with suppress(Exception):
                self._finish(running, state=TrialState.FAIL, error=error)
