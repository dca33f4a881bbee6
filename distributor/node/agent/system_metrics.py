"""Utilization of a node's CPUs, memory, network and GPUs, under MLflow's names."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from distributor.core.gpus import gpu_usage
from distributor.core.resources import PROC, memory_info
from distributor.rank.messages import Progress

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

    def is_due(self) -> bool:
        """Return whether it is time for the next sample."""
        return time.monotonic() >= self._next

    def sample(self) -> Progress:
        """Return the figures, named like ``system/node0-host/cpu_utilization_percentage``.

        `Progress.done` is the number of samples so far.
        """
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
