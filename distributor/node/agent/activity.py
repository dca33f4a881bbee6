"""Whether a node's ranks do anything: print, report, or use CPUs or GPUs."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from distributor.core.gpus import gpu_usage
from distributor.core.linux import cpu_seconds_of_descendants, parent_pid
from distributor.node.agent.output import AgentListener
from distributor.node.agent.worker_handle import WorkerHandle

IDLE_CPU = 0.02
"""Part of one core that idle ranks may use together: some of their threads poll."""


class _Sample(NamedTuple):
    time: float
    ranks: tuple[int, ...]
    output_bytes: int
    cpu_seconds: float


class ActivityMonitor:
    """Measures at an interval for how long a node's ranks have been idle.

    A rank is idle if it has written no output and no report, and its processes have used hardly any
    CPU time. With GPUs, all GPUs of the machine must be idle, too. A kernel of NCCL that waits for
    another rank keeps its GPU busy; NCCL has a timeout of its own for that.

    Parameters
    ----------
    workers : sequence of WorkerHandle
        The node's workers; those that are started later are appended to the same sequence.
    listener : AgentListener
        Receives how long the ranks have been idle.
    interval : float or None
        Seconds between two samples; None for no samples.
    uses_gpus : bool
        Whether the ranks use GPUs.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        listener: AgentListener,
        interval: float | None,
        uses_gpus: bool,
    ) -> None:
        self._workers = workers
        self._listener = listener
        # Only Linux reports the CPU time of other processes without another package.
        can_measure = interval is not None and sys.platform == "linux"
        self._interval = interval if interval is not None and can_measure else math.inf
        self._uses_gpus = uses_gpus
        self._next = math.inf
        self._last = _Sample(0.0, (), 0, 0.0)
        self._idle_since: float | None = None

    def start(self) -> None:
        """Take samples from now on, because all ranks have begun their work."""
        self._next = time.monotonic() + self._interval

    def report_idleness(self) -> None:
        """If a sample is due, take it, and call ``on_idle`` if the ranks are idle or were so."""
        if time.monotonic() < self._next:
            return
        last, sample = self._last, self._sample()
        self._last, self._next = sample, sample.time + self._interval
        if not self._is_active(last, sample):
            self._idle_since = self._idle_since or last.time
            self._listener.on_idle(sample.time - self._idle_since)
        elif self._idle_since is not None:
            self._idle_since = None
            self._listener.on_idle(0.0)

    def disregard_latest(self) -> None:
        """Count nothing that the ranks have done since the last sample: it was on our request."""
        if self._next < math.inf:
            self._last = self._sample()

    def _sample(self) -> _Sample:
        return _sample([worker for worker in self._workers if worker.working])

    def _is_active(self, last: _Sample, sample: _Sample) -> bool:
        if not sample.ranks or last.ranks != sample.ranks:
            return True
        if last.output_bytes != sample.output_bytes:
            return True
        # A process that ends takes its CPU time with it, so the sum can also become smaller.
        used = abs(sample.cpu_seconds - last.cpu_seconds)
        # User and system time are counted in whole ticks, so each may be a tick too much.
        rounding = 2 * len(sample.ranks) / os.sysconf("SC_CLK_TCK")
        if used > IDLE_CPU * (sample.time - last.time) + rounding:
            return True
        return self._uses_gpus and any(gpu.utilization for gpu in gpu_usage())


def _sample(workers: Sequence[WorkerHandle]) -> _Sample:
    files = [file for worker in workers for file in worker.output_files.values()]
    return _Sample(
        time.monotonic(),
        tuple(worker.origin.rank for worker in workers),
        sum(os.fstat(file.fileno()).st_size for file in files),
        # The ranks' parent is a supervisor, which is also the parent of their orphans.
        sum(map(cpu_seconds_of_descendants, {parent_pid(worker.pid) for worker in workers} - {0})),
    )
