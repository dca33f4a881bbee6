"""System metrics of a node are read without psutil, which a Spark executor may lack."""

from __future__ import annotations

import sys
from typing import Any

import psutil
import pytest

from distributor.node.agent import usage as host_usage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_figures_are_those_of_psutil() -> None:
    before = psutil.cpu_times(), psutil.net_io_counters()
    usage = host_usage.read_host_usage()
    after = psutil.cpu_times(), psutil.net_io_counters()

    idle = 1 - usage.cpu_busy / usage.cpu_total
    low, high = sorted(idle_share(times) for times, _ in (before, after))
    assert low - 0.01 < idle < high + 0.01
    memory = psutil.virtual_memory()
    assert usage.memory_percent == pytest.approx(memory.percent, abs=5)
    assert usage.memory_used == pytest.approx(memory.used, rel=0.1)
    assert usage.network is not None
    received, sent = usage.network
    assert before[1].bytes_recv <= received <= after[1].bytes_recv
    assert before[1].bytes_sent <= sent <= after[1].bytes_sent


def idle_share(times: Any) -> float:
    return float((times.idle + times.iowait) / (sum(times) - times.guest - times.guest_nice))
