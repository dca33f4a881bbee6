"""Where a rank's time goes: counters in memory that it shares with its agent.

The rank adds to them as it goes on, and its agent reads them whenever it likes, also those of a
rank that hangs, is stopped or was killed. So nothing is sent, and there is no thread.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from time import monotonic, thread_time
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
_END: Any = object()


class Counters(NamedTuple):
    """What one rank has done and used since its start. All times are in seconds.

    Parameters
    ----------
    alive : float
        From its start to the end of its work, or until now.
    cpu : float
        CPU time of its process and of the children that it has waited for.
    memory : float
        Its resident memory now (megabytes).
    gpu, gpu_memory : float
        Utilization (percent) and memory in use (megabytes) of its GPU; -1.0 if they are not known.
    steps : float
        Steps of optimizers.
    first : float
        From the rank's start to the end of its first step, without data and checkpoints.
    stepped : float
        The same from there to the end of its latest step.
    data : float
        Waiting for batches of data loaders.
    checkpoint : float
        Saving and reporting.
    waited : float
        Part of `stepped`: waiting for other ranks and for communication after the backward pass.
    step_cpu : float
        CPU time of its main thread within `stepped`, and while it waits for data and checkpoints;
        up to `CPU_INTERVAL` may be missing at the end.
    hooks : float
        What it takes to count the steps.
    models : float
        Models whose waiting is known.
    stopped : float
        In which its process was stopped, as by SIGSTOP.
    began : float
        When, by ``time.monotonic``, it has begun to count.
    activity, since : float
        What it waits for now (`DATA`, `CHECKPOINT` or `WAITED`; 0.0 for nothing), and since when.
    """

    # Its agent knows these and `stopped`; the rank counts the others.
    alive: float = 0.0
    cpu: float = 0.0
    memory: float = 0.0
    gpu: float = -1.0
    gpu_memory: float = -1.0
    steps: float = 0.0
    first: float = 0.0
    stepped: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0
    waited: float = 0.0
    step_cpu: float = 0.0
    hooks: float = 0.0
    models: float = 0.0
    stopped: float = 0.0
    began: float = 0.0
    activity: float = 0.0
    since: float = 0.0


FIELDS = Counters._fields
STEPS, FIRST, STEPPED, DATA, CHECKPOINT, WAITED, CPU = range(5, 12)
HOOKS, MODELS, STOPPED, BEGAN, ACTIVITY, SINCE = range(12, 18)
NUM_REPORTED = BEGAN
"""How many fields an agent reports."""
SIZE = len(FIELDS) * 8  # bytes


def write_stopped(descriptor: int, seconds: float) -> None:
    """Count so many seconds in which the rank was stopped by now."""
    os.pwrite(descriptor, struct.pack("d", seconds), STOPPED * 8)


def read_counters(descriptor: int, now: float) -> Counters:
    """Return the counters in a rank's file; what it waits for at `now` counts already."""
    cells = memoryview(os.pread(descriptor, SIZE, 0).ljust(SIZE, b"\0")).cast("d")
    counters = list(cells)
    if (kind := int(counters[ACTIVITY])) in (DATA, CHECKPOINT):
        counters[kind] += max(0.0, now - counters[SINCE])
    return Counters(*counters)


READING = 5e-4
"""The part of the time of steps that reading how long they waited may take."""
GPU_STRIDE = 23  # a prime: many programs do something at every tenth or hundredth step
"""In how many steps it is measured on GPUs, because each time is a synchronization."""
OUTLIER = 3.0
"""A step that takes this many times the mean is read in any case, and for itself alone."""
CPU_INTERVAL = 0.01
"""How often CPU time is read (seconds): it is a system call, and takes as long as all else."""


class StepClock:
    """Counts a rank's steps, and what it waits for between them.

    Only the thread that creates it counts, and no process that it forks.

    Parameters
    ----------
    descriptor : int or None
        The file of the counters; None to count nothing.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.counts = descriptor is not None
        self._cells: Any = [0.0] * len(FIELDS)
        if descriptor is not None:
            os.ftruncate(descriptor, SIZE)
            self._cells = memoryview(mmap.mmap(descriptor, SIZE)).cast("d")
            os.register_at_fork(after_in_child=self._stop)
        self._thread = get_ident()
        self._last = self._cells[BEGAN] = monotonic()
        self._first_cpu = self._cpu_due = 0.0
        self._aside = 0.0
        self._mean = 0.0
        self._is_outlier = False
        self._due = math.inf  # how long steps must have taken until the waiting is read again
        self._models: list[_Model] = []
        self._read_until = self._read_stopped = 0.0

    def _stop(self) -> None:
        self.counts = False

    def timed(self, batches: Iterator[T]) -> Generator[T, None, None]:
        """Yield batches; the wait for each of them counts as `DATA`."""
        next_batch = self.timing(DATA)(partial(next, batches, _END))
        try:
            while (batch := next_batch()) is not _END:
                yield batch
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def timing(self, kind: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Return a decorator: calls of the function count as `DATA`, `CHECKPOINT` or `WAITED`."""
        # What follows runs in each step, so it calls nothing that it need not.
        cells, thread = self._cells, self._thread

        def decorate(function: Callable[..., T]) -> Callable[..., T]:
            def _call(*args: Any, **kwargs: Any) -> T:  # a stack names what it calls
                if not self.counts or cells[ACTIVITY] or get_ident() != thread:
                    return function(*args, **kwargs)  # it is a part of another wait, or of none
                cells[SINCE] = begin = monotonic()
                cells[ACTIVITY] = kind
                try:
                    return function(*args, **kwargs)
                finally:
                    cells[kind] += monotonic() - begin
                    cells[ACTIVITY] = 0.0

            return _call

        return decorate

    def add_model(
        self, model: Any, read: Callable[[Any], tuple[int, float] | None], knows_all: bool
    ) -> None:
        """Read the waiting of a model in its steps.

        Parameters
        ----------
        model : object
            The model, to which a weak reference is kept.
        read : callable
            Returns the number of its latest iteration that was measured, and the seconds that it
            waited after its backward pass; None if there is none.
        knows_all : bool
            Whether each iteration is measured.
        """
        self._models.append(_Model(weakref.ref(model), read, knows_all))
        self._due = min(self._due, self._cells[STEPPED])
        self._cells[MODELS] = len(self._models)

    def end_step(self) -> None:
        """Count a step; called at its end. An error of the clock itself stops it."""
        if not self.counts or get_ident() != self._thread:
            return
        try:
            cells, now = self._cells, monotonic()
            aside = cells[DATA] + cells[CHECKPOINT]
            length = now - self._last - aside + self._aside
            if cells[STEPS]:
                stepped = cells[STEPPED]
                if stepped >= self._due or (self._is_outlier and self._models):
                    self._read_waiting()
                cells[STEPPED] = stepped + length
                if stepped >= self._cpu_due:
                    cells[CPU] = thread_time() - self._first_cpu
                    self._cpu_due = stepped + CPU_INTERVAL
                self._is_outlier = length > OUTLIER * self._mean > 0.0
                self._mean += (length - self._mean) * (0.1 if self._mean else 1.0)
            else:
                cells[FIRST], self._first_cpu = length, thread_time()
            self._last, self._aside = now, aside
            cells[STEPS] += 1.0
            cells[HOOKS] += monotonic() - now
        except Exception:
            self._stop()

    def _read_waiting(self) -> None:
        """Count the waiting up to the step before: torch notes it when the next one begins."""
        cells = self._cells
        begin = thread_time()  # not while other processes have the CPU
        waited = sum([model.waited(self._is_outlier) for model in self._models])
        self._due += (thread_time() - begin) / READING
        if waited:
            # A rank that is stopped while it waits for others does not wait for them.
            stopped, self._read_stopped = cells[STOPPED] - self._read_stopped, cells[STOPPED]
            longest, self._read_until = cells[STEPPED] - self._read_until, cells[STEPPED]
            cells[WAITED] += min(waited, max(0.0, longest - stopped))


@dataclass
class _Model:
    """How long a model has waited in its iterations."""

    model: weakref.ref[Any]
    read: Callable[[Any], tuple[int, float] | None]
    knows_all: bool
    latest: int = 0  # iteration that was read
    counted: int = 0  # iterations whose waiting is known

    def waited(self, is_outlier: bool) -> float:
        """Return the seconds in the iterations since those counted, of which the latest is known.

        The others were like it, unless it is an outlier: then they are like the next that is none.
        """
        model = self.model()
        found = None if model is None else self.read(model)
        if found is None or found[0] == self.latest:
            return 0.0
        is_first = not self.latest
        self.latest, seconds = found
        if is_first:  # its first iterations are before the end of the first step
            self.counted = self.latest
            return 0.0
        number = 1 if is_outlier and self.knows_all else self.latest - self.counted
        self.counted += number
        return seconds * number
