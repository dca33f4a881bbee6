"""What the trials of a study share: computed DataFrames, and a run of MLflow around theirs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from distributor.control.run import Run
from distributor.control.waiting import Cancellation
from distributor.core.text import Redaction, first_line
from distributor.core.threads import in_background
from distributor.rank.messages import Progress
from distributor.run_spec import new_run_id
from distributor.screen.messages import RunLabel, shown_from, warn
from distributor.tracking import (
    ANSWER_SECONDS,
    Recorder,
    TrackedRun,
    Untracked,
    end_child,
    open_child,
    open_run,
)
from distributor.tune.trials import Job

STATUS = {
    TrialState.COMPLETE: "FINISHED",
    TrialState.PRUNED: "KILLED",
    TrialState.FAIL: "FAILED",
}
"""The states of MLflow's runs, as in its own integration with Optuna."""


KEPT = 4
"""DataFrames of several trials that are kept although none of them runs, the latest."""


@dataclass(eq=False)
class _Opened:
    datasets: Any
    context: contextlib.ExitStack
    users: set[int] = field(default_factory=set)


class StudyDatasets:
    """Computes the DataFrames of trials once, as long as these are the same; a context manager."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: dict[Hashable, _Opened] = {}
        self.cancellation = Cancellation()

    def __enter__(self) -> StudyDatasets:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for key in list(self._opened):
            self._opened.pop(key).context.close()

    def share(self, run: Run) -> None:
        """Have a run use what others have computed, or compute it now."""
        if run.datasets is None:
            return
        from distributor.launchers.spark.datasets import Datasets, SharedDatasets

        assert isinstance(run.datasets, Datasets)
        key = run.datasets.key
        if key not in self._opened:
            self._close_unused()
            datasets, context = Datasets(run.datasets.given), contextlib.ExitStack()
            pool = self._job.distributor.pool
            context.enter_context(
                datasets.opened(new_run_id(), run.call_site, pool, self.cancellation)
            )
            self._opened[key] = _Opened(datasets, context)
        self._opened[key].users.add(id(run))
        run.datasets = SharedDatasets(self._opened[key].datasets, run.datasets)

    def end(self, run: Run) -> None:
        """Note that a run has ended."""
        for each in self._opened.values():
            each.users.discard(id(run))

    def _close_unused(self) -> None:
        for key in [key for key, each in [*self._opened.items()][:-KEPT] if not each.users]:
            self._opened.pop(key).context.close()


class StudyTracking:
    """The MLflow runs of a study: one for it, and inside that one for each trial.

    A context manager, which ends the study's run. Without MLflow nothing is recorded.
    """

    def __init__(self, name: str, keys: tuple[str, ...]) -> None:
        self._name, self._keys = name, keys
        self._parent: TrackedRun | Untracked | None = None
        self._children: dict[int, TrackedRun] = {}
        self._calls: list[Future[None]] = []
        self._context = contextlib.ExitStack()

    def __enter__(self) -> StudyTracking:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        try:
            wait(self._calls, ANSWER_SECONDS)
        finally:
            self._context.__exit__(*exc_info)
        errors = [call.exception() if call.done() else TimeoutError() for call in self._calls]
        if error := next(filter(None, errors), None):
            warn(f"How a trial has ended could not be recorded in MLflow: {first_line(error)}")

    def opener(self, trial: Trial) -> Callable[..., TrackedRun | Untracked]:
        """Return what opens the run of a trial, for the arguments of `open_run`."""

        def tracked(
            name: str,
            facts: Mapping[str, object],
            shares_disk: bool,
            uses_mlflow: Callable[[], bool],
        ) -> TrackedRun | Untracked:
            if self._parent is None:
                of_all = {key: value for key, value in facts.items() if key != "run_id"}
                self._parent = open_run(self._name, of_all, shares_disk, uses_mlflow)
                if isinstance(self._parent, TrackedRun):
                    recorder = Recorder(self._parent, "first", Redaction({}), RunLabel(self._name))
                    with shown_from(logging.INFO):  # the link
                        self._context.enter_context(recorder)
            if isinstance(self._parent, Untracked):
                return self._parent
            child = open_child(self._parent, f"trial {trial.number}", facts, trial.params)
            if isinstance(child, TrackedRun):
                self._children[trial.number] = child
            return child

        return tracked

    def record(self, run: Run, values: tuple[float, ...], step: int) -> None:
        """Record what a trial's run has reported."""
        if isinstance(run.recorder, Recorder):
            run.recorder.record(Progress(step, metrics=dict(zip(self._keys, values, strict=True))))

    def end(self, finished: FrozenTrial) -> None:
        """Record how a trial has ended, in the background."""
        if child := self._children.pop(finished.number, None):
            values = finished.values or ()
            names = ["value"] if len(values) == 1 else [f"value_{n}" for n in range(len(values))]
            metrics, status = dict(zip(names, values, strict=True)), STATUS[finished.state]
            self._calls.append(in_background(lambda: end_child(child, metrics, status), "mlflow"))
