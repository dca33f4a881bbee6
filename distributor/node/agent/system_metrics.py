"""Utilization of a node's CPUs, memory, network and GPUs, under MLflow's names."""

from __future__ import annotations

import time
from collections.abc import Iterator

from distributor.core.gpus import gpu_usage
from distributor.core.telemetry import Progress

SAMPLE_INTERVAL = 10.0
MEGABYTE = 1e6


class SystemMetrics:
    """Looks now and then at what this machine does.

    Parameters
    ----------
    node : str
        The node's name, which sets its figures apart from those of others.
    """

    def __init__(self, node: str) -> None:
        import psutil  # only where somebody wants to know

        self._psutil = psutil
        self._node = node
        self._looks = 0
        self._next = time.monotonic() + SAMPLE_INTERVAL
        self._network = psutil.net_io_counters()
        psutil.cpu_percent()  # the next look tells the mean since this one

    def due(self) -> bool:
        """Tell whether it is time for the next look."""
        return time.monotonic() >= self._next

    def look(self) -> Progress:
        """Give the figures, under names such as ``system/node0-host/cpu_utilization_percentage``.

        What `done` counts is the looks.
        """
        self._next = time.monotonic() + SAMPLE_INTERVAL
        self._looks += 1
        named = {f"system/{self._node}/{name}": figure for name, figure in self._figures()}
        return Progress(done=self._looks, metrics=named)

    def _figures(self) -> Iterator[tuple[str, float]]:
        yield "cpu_utilization_percentage", self._psutil.cpu_percent()
        memory = self._psutil.virtual_memory()
        yield "system_memory_usage_megabytes", memory.used / MEGABYTE
        yield "system_memory_usage_percentage", memory.percent
        before, self._network = self._network, self._psutil.net_io_counters()
        if before and self._network:  # a container may have none
            received = self._network.bytes_recv - before.bytes_recv
            yield "network_receive_megabytes", received / MEGABYTE
            sent = self._network.bytes_sent - before.bytes_sent
            yield "network_transmit_megabytes", sent / MEGABYTE
        for index, (busy, used, whole) in enumerate(gpu_usage()):
            yield f"gpu_{index}_utilization_percentage", busy
            yield f"gpu_{index}_memory_usage_megabytes", used / MEGABYTE
            yield f"gpu_{index}_memory_usage_percentage", 100 * used / whole
