"""The command ``distributor doctor`` in a process of its own, and its checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from support.cluster import Cluster

SECONDS = 200.0
EXAMINE = """
def examine(**settings):
    import distributor
    report = distributor.doctor(**{"num_processes": 2, "local_mode": False, **settings})
    send(report=json.loads(report.to_json()))
"""
"""Defines the examination in a driver program."""
ONCE = "\nexamine()\n"


class Found(NamedTuple):
    """The checks of one report."""

    checks: list[dict[str, str]]
    exit_code: int = 0

    def having(self, status: str) -> dict[str, dict[str, str]]:
        """Return the checks of a status, by name."""
        return {check["name"]: check for check in self.checks if check["status"] == status}

    @property
    def text(self) -> str:
        """What is wrong, for the message of a failed test."""
        wrong = [check for check in self.checks if check["status"] not in ("ok", "not checked")]
        return json.dumps(wrong, indent=1)


def doctor(
    *arguments: str, env: Mapping[str, str] | None = None, inside: Sequence[str] = ()
) -> Found:
    """Run the command, if wanted inside another one, and return what it found."""
    done = subprocess.run(
        [*inside, sys.executable, "-m", "distributor", "doctor", "--json", *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return found_in(json.loads(done.stdout), done.returncode)


def found_in(report: dict[str, Any], exit_code: int = 0) -> Found:
    """Return the checks of a report that was converted to JSON."""
    return Found(report["checks"], exit_code)


def examined(
    cluster: Cluster, source: str = EXAMINE + ONCE, *, with_spark: bool = True, **conf: str
) -> Found:
    """Examine in a Spark application of its own, which the source creates if not `with_spark`."""
    conf = {"spark.cores.max": "2", **conf}
    with cluster.driver(source, with_spark=with_spark, **conf) as driver:
        return found_in(driver.receive("report")["report"])
