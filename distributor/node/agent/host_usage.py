"""Counters of this machine's CPUs, memory and network.

Linux has them in ``/proc``, which is read with psutil's definitions of each figure: a Spark
executor may lack psutil, because Spark ships only this package. Other systems need psutil.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import NamedTuple

from distributor.core.resources import PROC, memory_info


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
