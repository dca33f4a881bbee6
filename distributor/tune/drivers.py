"""Which driver runs a trial, and until when it lived: attributes of the trial in the storage.

So another driver can repeat the trials of one that was killed. An alive one writes the time every
10 s, by the clock of its machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from distributor.core.addresses import host_name

ALIVE_SECONDS = 10.0
"""Seconds between two signs of life."""
SILENT_SECONDS = 60.0
"""Seconds without one after which a driver counts as dead."""
DRIVER, ALIVE, RUN, RETRIED = (
    f"distributor:{name}" for name in ("driver", "alive", "run", "retried")
)
"""Attributes of a trial: its driver, the time of its last sign of life, the name of its run, and
the number of the trial that it repeats."""


class Driver:
    """A driver of a study, in this process; a context manager, which gives signs of life.

    Parameters
    ----------
    study : optuna.Study
        The study.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self._id = f"{host_name()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._trials: dict[int, Trial] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="study", daemon=True)
        self._search_at = 0.0

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, trial: Trial) -> str:
        """Note that this driver runs a trial, and return the name of the trial's run."""
        trial.set_user_attr(ALIVE, time.time())
        trial.set_user_attr(DRIVER, self._id)
        name = trial.user_attrs.get(RUN)
        if name is None:
            study = re.sub(r"[^\w-]+", "-", self._study.study_name).strip("-")[:100] or "study"
            name = f"{study}-{trial.number}-{secrets.token_hex(4)}"
            trial.set_user_attr(RUN, name)
        self._trials[trial.number] = trial
        return str(name)

    def end(self, trial: Trial) -> None:
        """Note that a trial no longer runs."""
        self._trials.pop(trial.number, None)

    def repeat_trials_of_dead(self) -> list[int]:
        """Record trials of dead drivers as failed, and enqueue each again; return their numbers.

        It looks for them every `ALIVE_SECONDS`. A repeated trial has the parameters and the run's
        name of the first, and so resumes from its checkpoint.
        """
        if time.monotonic() < self._search_at:
            return []
        self._search_at = time.monotonic() + ALIVE_SECONDS
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [
            trial.number for trial in running if self._is_of_dead(trial) and self._repeat(trial)
        ]

    def _is_of_dead(self, trial: FrozenTrial) -> bool:
        alive = trial.user_attrs.get(ALIVE, float("inf"))
        is_own = trial.user_attrs.get(DRIVER) == self._id
        return not is_own and time.time() - alive > SILENT_SECONDS

    def _repeat(self, trial: FrozenTrial) -> bool:
        try:
            self._study.tell(trial.number, state=TrialState.FAIL)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):  # another driver has
            return False
        attributes = {RETRIED: trial.number, **trial.user_attrs}
        if trial.intermediate_values:
            attributes[RETRIED] = trial.number
        attributes.pop(ALIVE, None)  # or others would take it for dead while it is asked for
        self._study.enqueue_trial(trial.params, user_attrs=attributes)
        return True

    def _live(self) -> None:
        while not self._ended.wait(ALIVE_SECONDS):
            for trial in list(self._trials.values()):
                with contextlib.suppress(Exception):  # it has ended, or the storage is away
                    trial.set_user_attr(ALIVE, time.time())


def earlier_values(study: optuna.Study, trial: Trial, first: float) -> dict[int, tuple[float, ...]]:
    """Report what the trial that a trial repeats has reported before a step; return it by step."""
    number = trial.user_attrs.get(RETRIED)
    if number is None:
        return {}
    values = study.get_trials(deepcopy=False)[number].intermediate_values
    earlier: dict[int, tuple[float, ...]] = {
        step: (value,) for step, value in values.items() if step < first
    }
    for step, reported in earlier.items():
        trial.report(reported[0], step)
    return earlier
