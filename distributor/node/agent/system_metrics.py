"""Utilization of a node's CPUs, memory, network and GPUs, under MLflow's names."""

from __future__ import annotations

import time
from collections.abc import Iterator

from distributor.core.gpus import gpu_usage
from distributor.node.agent.host_usage import read_host_usage
from distributor.rank.messages import Progress

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
