"""What a node's ranks use: utilization under MLflow's names, and whether they do anything."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from distributor.core.gpus import gpu_usage
from distributor.core.processes import (
    Stat,
    cpu_and_memory,
    cpu_seconds_of_descendants,
    parent_pid,
    stat_field,
)
from distributor.core.resources import PROC, memory_info
from distributor.node.agent.worker_handle import WorkerHandle
from distributor.node.process.specs import NodeShare
from distributor.rank.messages import Progress, RanksUse
from distributor.rank.step_clock import (
    NUM_REPORTED,
    STEPS,
    Counters,
    read_counters,
    write_stopped,
)

# Linux has them in ``/proc``, which is read with psutil's definitions of each figure: a Spark
# executor may lack psutil, because Spark ships only this package. Other systems need psutil.


class HostUsage(NamedTuple):
    """What this machine has used by now.

    CPU times are in seconds or clock ticks since the machine started, memory is in bytes, and
    network traffic is in bytes of all interfaces together, loopback included. ``network`` is None
    if there is no interface, as in some containers.
    """

    cpu_busy: float
    cpu_total: float
    memory_used: int
    memory_percent: float
    network: tuple[int, int] | None


def has_host_usage() -> bool:
    """Return whether this machine's counters can be read."""
    return sys.platform == "linux" or find_spec("psutil") is not None


def read_host_usage() -> HostUsage:
    """Read the counters of this machine."""
    return _from_proc() if sys.platform == "linux" else _from_psutil()


def _from_proc() -> HostUsage:
    # user, nice, system, idle, iowait, irq, softirq, steal; guests' times are in user and nice.
    times = [float(ticks) for ticks in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    memory = memory_info()
    total, available = memory["MemTotal"], memory.get("MemAvailable", memory["MemFree"])
    interfaces = [
        line.rpartition(":")[2].split() for line in (PROC / "net/dev").read_text().splitlines()[2:]
    ]
    received_sent = (sum(int(i[0]) for i in interfaces), sum(int(i[8]) for i in interfaces))
    return HostUsage(
        cpu_busy=sum(times) - sum(times[3:5]),
        cpu_total=sum(times),
        memory_used=total - available,
        memory_percent=100 * (total - available) / total,
        network=received_sent if interfaces else None,
    )


def _from_psutil() -> HostUsage:
    import psutil

    times, memory, network = psutil.cpu_times(), psutil.virtual_memory(), psutil.net_io_counters()
    return HostUsage(
        cpu_busy=sum(times) - times.idle,
        cpu_total=sum(times),
        memory_used=memory.used,
        memory_percent=memory.percent,
        network=(network.bytes_recv, network.bytes_sent) if network else None,
    )


SAMPLE_INTERVAL = 10.0
"""Seconds between two samples, as in MLflow's own system metrics."""
MEGABYTE = 1e6


class SystemMetrics:
    """Samples the utilization of this machine at an interval.

    Parameters
    ----------
    node : str
        The node's name, which distinguishes its figures from those of other nodes.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._num_samples = 0
        self._next = time.monotonic() + SAMPLE_INTERVAL
        self._before = read_host_usage()

    def sample_if_due(self) -> Progress | None:
        """Return the figures, named like ``system/node0-host/cpu_utilization_percentage``.

        `Progress.done` is the number of samples so far. None if it is not yet time for one.
        """
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + SAMPLE_INTERVAL
        self._num_samples += 1
        named = {f"system/{self._node}/{name}": figure for name, figure in self._figures()}
        return Progress(done=self._num_samples, metrics=named)

    def _figures(self) -> Iterator[tuple[str, float]]:
        before, now = self._before, read_host_usage()
        self._before = now
        total = now.cpu_total - before.cpu_total
        busy = min(max(now.cpu_busy - before.cpu_busy, 0.0), total)  # Linux's counters can go back
        yield "cpu_utilization_percentage", 100 * busy / total if total > 0 else 0.0
        yield "system_memory_usage_megabytes", now.memory_used / MEGABYTE
        yield "system_memory_usage_percentage", now.memory_percent
        if before.network and now.network:  # a container may have no network
            received, sent = now.network[0] - before.network[0], now.network[1] - before.network[1]
            yield "network_receive_megabytes", received / MEGABYTE
            yield "network_transmit_megabytes", sent / MEGABYTE
        for index, (busy, used, whole) in enumerate(gpu_usage()):
            yield f"gpu_{index}_utilization_percentage", busy
            yield f"gpu_{index}_memory_usage_megabytes", used / MEGABYTE
            yield f"gpu_{index}_memory_usage_percentage", 100 * used / whole


STOP_INTERVAL = 0.1
"""Seconds between two looks whether a rank's process is stopped."""
FIRST_INTERVAL, LAST_INTERVAL, GROWTH = 1.0, 15.0, 300.0
"""Seconds between two samples of the ranks at first and later, and the age per second of it."""
RANKS_PER_SECOND = 200
"""Ranks of a run that have one sample a second at most."""


class RanksMonitor:
    """Samples what each rank of a node has done and used.

    Parameters
    ----------
    workers : sequence of WorkerHandle
        The node's workers; those that are started later are appended to the same sequence.
    node : NodeShare
        The node's share of the run.
    """

    def __init__(self, workers: Sequence[WorkerHandle], node: NodeShare) -> None:
        self._workers = workers
        self._gpus = node.gpus or ()
        self._began = time.monotonic()
        self._least = max(FIRST_INTERVAL, node.world_size / RANKS_PER_SECOND)
        self._next = self._began + self._least if node.settings.step_times else math.inf
        self._looked_at = self._began
        self._gpus_due = 0.0
        self._latest: dict[int, Counters] = {}

    def sample_if_due(self) -> RanksUse | None:
        """Return the ranks' use, if it is time for it."""
        now = time.monotonic()
        if self._next == math.inf:
            return None
        if now >= self._looked_at + STOP_INTERVAL:
            self._note_stopped(now)
        return self.sample(now) if now >= self._next else None

    def sample(self, now: float) -> RanksUse:
        """Return the ranks' use now."""
        interval = min(max((now - self._began) / GROWTH, FIRST_INTERVAL), LAST_INTERVAL)
        self._next = now + max(self._least, interval)
        if self._gpus and now >= self._gpus_due:
            self._gpus_due = now + SAMPLE_INTERVAL
            self._sample_gpus()
        return RanksUse([self._row(worker, now) for worker in self._workers])

    def _note_stopped(self, now: float) -> None:
        seconds, self._looked_at = now - self._looked_at, now
        if sys.platform == "linux":
            for worker in self._workers:
                with contextlib.suppress(OSError):  # it has ended
                    if worker.working and stat_field(worker.pid, Stat.STATE) in "Tt":
                        file = _counters(worker)
                        write_stopped(file, read_counters(file, now).stopped + seconds)

    def _row(self, worker: WorkerHandle, now: float) -> list[float]:
        rank = worker.origin.rank
        known = self._latest.get(rank, Counters())
        until = min(now, worker.ended_at)
        use = Counters(*known[:STEPS], *read_counters(_counters(worker), until)[STEPS:])
        if use.began:
            use = use._replace(alive=max(0.0, until - use.began))
        if worker.working:
            with contextlib.suppress(OSError):  # it has ended, or the system has no such files
                cpu, memory = cpu_and_memory(worker.pid)
                use = use._replace(cpu=cpu, memory=memory / MEGABYTE)
        self._latest[rank] = use
        return [rank, *(round(each, 4) for each in use[:NUM_REPORTED])]

    def _sample_gpus(self) -> None:
        usages = gpu_usage()
        for worker in self._workers:
            gpu = self._gpus[worker.origin.local_rank % len(self._gpus)]
            if gpu.isdecimal() and int(gpu) < len(usages):
                usage, rank = usages[int(gpu)], worker.origin.rank
                self._latest[rank] = self._latest.get(rank, Counters())._replace(
                    gpu=usage.utilization, gpu_memory=usage.memory_used / MEGABYTE
                )


def _counters(worker: WorkerHandle) -> int:
    assert worker.counters is not None, "ranks are sampled only with counters"
    return worker.counters.fileno()


IDLE_CPU = 0.02
"""Part of one core that idle ranks may use together: some of their threads poll."""


class _Activity(NamedTuple):
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
    interval : float or None
        Seconds between two measurements; None for no measurements.
    uses_gpus : bool
        Whether the ranks use GPUs.
    """

    def __init__(
        self, workers: Sequence[WorkerHandle], interval: float | None, uses_gpus: bool
    ) -> None:
        self._workers = workers
        # Only Linux reports the CPU time of other processes without another package.
        self._interval = math.inf if interval is None or sys.platform != "linux" else interval
        self._uses_gpus = uses_gpus
        self._next = math.inf
        self._last = _Activity(0.0, (), 0, 0.0)
        self._idle_since: float | None = None

    def start(self) -> None:
        """Measure from now on, because all ranks have begun their work."""
        self._next = time.monotonic() + self._interval

    def idle_seconds_if_due(self) -> float | None:
        """Return for how long the ranks have been idle, or 0.0 once they are active again.

        None if it is not yet time for a measurement, or if they were active before, too.
        """
        if time.monotonic() < self._next:
            return None
        last, now = self._last, self._measure()
        self._last, self._next = now, now.time + self._interval
        if not self._is_active(last, now):
            self._idle_since = self._idle_since or last.time
            return now.time - self._idle_since
        was_idle, self._idle_since = self._idle_since is not None, None
        return 0.0 if was_idle else None

    def disregard_latest(self) -> None:
        """Count nothing that the ranks have done since the last measurement: we requested it."""
        if self._next < math.inf:
            self._last = self._measure()

    def _measure(self) -> _Activity:
        workers = [worker for worker in self._workers if worker.working]
        files = [file for worker in workers for file in worker.output_files.values()]
        # The ranks' parent is a supervisor, which is also the parent of their orphans.
        parents = {parent_pid(worker.pid) for worker in workers} - {0}
        return _Activity(
            time.monotonic(),
            tuple(worker.origin.rank for worker in workers),
            sum(os.fstat(file.fileno()).st_size for file in files),
            sum(map(cpu_seconds_of_descendants, parents)),
        )

    def _is_active(self, last: _Activity, now: _Activity) -> bool:
        if not now.ranks or last.ranks != now.ranks or last.output_bytes != now.output_bytes:
            return True
        # A process that ends takes its CPU time with it, so the sum can also become smaller.
        used = abs(now.cpu_seconds - last.cpu_seconds)
        # User and system time are counted in whole ticks, so each may be a tick too much.
        rounding = 2 * len(now.ranks) / os.sysconf("SC_CLK_TCK")
        if used > IDLE_CPU * (now.time - last.time) + rounding:
            return True
        return self._uses_gpus and any(gpu.utilization for gpu in gpu_usage())
