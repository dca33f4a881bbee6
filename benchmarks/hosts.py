"""Seconds until a run reports a host that is cut off, on machines that are network namespaces."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import ROOT
from benchmarks.packages import library

REPORT_SECONDS = 120.0


def seconds_until_reported(repeats: int) -> list[float]:
    """Cut a host of two off while both ranks train, and measure until the run fails."""
    sys.path.append(str(ROOT / "tests"))
    cluster_on = library("support.cluster").cluster_on
    machines, two_machines = library("support.machines"), library("support.two_machines")
    if why_not := machines.why_not_apart():
        raise RuntimeError(why_not)
    seconds = []
    with tempfile.TemporaryDirectory() as name, machines.machines_apart(4) as four:
        for number in range(repeats):
            folder = Path(name, str(number))
            folder.mkdir()
            # A cluster for each, because Spark counts on the executors of a lost host for minutes.
            with cluster_on(four, folder) as cluster:
                training = two_machines.Training(cluster, folder / "ranks")
                with training.start() as driver:
                    training.await_ranks()
                    machine = cluster.on_workers[0]
                    machine.cut()
                    cut_at = time.time()
                    report = driver.receive("error", REPORT_SECONDS)
                    machine.mend()
            if report["error"] != "NodeLost":
                raise RuntimeError(f"not a lost host: {report}")
            seconds.append(report["at"] - cut_at)
    return seconds
