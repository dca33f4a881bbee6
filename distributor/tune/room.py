"""How many trials run beside each other, with how many ranks, and on which GPUs."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field, replace

from distributor.control.run import Run
from distributor.core.rank_variables import THREADS_VARIABLE
from distributor.launchers.local import LocalLauncher
from distributor.settings import check_num_processes
from distributor.torch_distributor import TorchDistributor, plan

MANY = 1024
"""More GPUs than a machine has."""


@dataclass(eq=False)
class Place:
    """What a trial holds.

    Parameters
    ----------
    ranks : int
        How many ranks it has at most.
    gpus : tuple of str
        This machine's GPUs that are its own.
    run : Run or None
        Its run.
    """

    ranks: int
    gpus: tuple[str, ...] = ()
    run: Run | None = field(default=None, init=False)

    @property
    def is_waiting(self) -> bool:
        """Whether not all ranks of the current attempt have started."""
        progress = self.run.block.progress if self.run else None
        return progress is None or not progress.all_started


class Room:
    """The room for trials.

    Parameters
    ----------
    distributor : TorchDistributor
        That of all trials.
    n_jobs : int or None
        How many trials may run at once.
    """

    def __init__(self, distributor: TorchDistributor, n_jobs: int | None) -> None:
        count = distributor.num_processes
        self._least, self._most = check_num_processes("num_processes", count)
        self._places: list[Place] = []
        self._gpus: list[str] = []
        with distributor.spelling.renames():
            launcher = plan(distributor, self._least, self._most).launcher
            if isinstance(launcher, LocalLauncher) and launcher.gpus:
                with contextlib.suppress(RuntimeError):  # the others are of another type
                    launcher = plan(distributor, 1, MANY).launcher
            launcher.check_room(self._least)
        if isinstance(launcher, LocalLauncher):
            self._gpus = list(launcher.gpus or ())
        self._launcher = launcher
        self._n_jobs = math.inf if n_jobs is None else n_jobs
        self._shares_cpus = (
            isinstance(launcher, LocalLauncher) and not self._gpus and self._n_jobs > 1
        )

    def take(self, left: float) -> Place | None:
        """Take a place for a trial, if there is one.

        Parameters
        ----------
        left : float
            How many trials are still to be started.
        """
        ranks = self._ranks_of_next(left)
        if not ranks:
            return None
        gpus, self._gpus = tuple(self._gpus[:ranks]), self._gpus[ranks:]
        place = Place(ranks, gpus)
        self._places.append(place)
        return place

    def give_back(self, place: Place) -> None:
        """Note that a trial has ended."""
        self._places.remove(place)
        self._gpus += place.gpus

    def num_processes(self, place: Place) -> int | tuple[int, int]:
        """Return the number of ranks of a trial, as a setting."""
        return place.ranks if place.ranks <= self._least else (self._least, place.ranks)

    def enter(self, place: Place, run: Run) -> None:
        """Have a run use a place."""
        place.run = run
        if place.gpus and isinstance(run.launcher, LocalLauncher):
            run.launcher = replace(run.launcher, gpus=place.gpus)
        elif self._shares_cpus and THREADS_VARIABLE not in os.environ:
            # As for several ranks of one run.
            run.spec = replace(run.spec, env={THREADS_VARIABLE: "1", **run.spec.env})

    def _ranks_of_next(self, left: float) -> int:
        """Return how many ranks a trial has that begins now; 0 if it must wait."""
        jobs = min(self._n_jobs - len(self._places), left)
        if jobs < 1:
            return 0
        if self._shares_cpus and self._n_jobs < math.inf:  # the user knows best
            return self._most
        if self._launcher.grows:
            # It grows for what waits: of several that wait, each could hold what others need.
            return 0 if any(place.is_waiting for place in self._places) else self._most
        if (room := self._launcher.room()) is None:
            return self._most if not self._places or self._n_jobs < math.inf else 0
        free = room - sum(place.ranks for place in self._places)
        if free < self._least:
            return 0 if self._places else self._least
        share = free // int(min(free // self._least, jobs))
        return min(self._most, share - share % self._launcher.ranks_per_task)
