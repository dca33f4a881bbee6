"""`distributor.doctor` on the session's Spark; test_cluster_faults.py breaks a cluster's parts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

import distributor
from distributor.diagnosis.report import Report

pytestmark = pytest.mark.spark
ON_EXECUTORS = {"run", "versions", "network to the driver"}


def by_status(report: Report, status: str) -> dict[str, str]:
    """Return what the checks of a status have found, with its fix, by name."""
    checks = [check for check in report.checks if check.status.value == status]
    return {check.name: f"{check.found} {check.fix}" for check in checks}


def test_a_sound_cluster_has_no_failure(spark: Any, tmp_path: Path) -> None:
    report = distributor.doctor(local_mode=False, storage_path=tmp_path)

    assert not report.failures, report
    found = by_status(report, "ok")
    assert ON_EXECUTORS | {"slots", "storage"} < found.keys()
    assert "2 ranks started" in found["run"], "one for each executor"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert spark.range(3).count() == 3, "the session still works"


def test_gpus_that_the_session_does_not_have(spark: Any) -> None:
    report = distributor.doctor(local_mode=False, gpus=2)

    [(name, text)] = by_status(report, "failure").items()
    assert name == "GPUs"
    assert "spark.task.resource.gpu.amount" in text
    assert "conf/spark-defaults-gpu.conf" in text
    assert by_status(report, "not checked").keys() >= ON_EXECUTORS


def test_a_hub_port_that_is_taken(spark: Any) -> None:
    with socket.create_server((spark.conf.get("spark.driver.host"), 0)) as taken:
        port = taken.getsockname()[1]
        report = distributor.doctor(2, local_mode=False, hub_port=port)

    text = by_status(report, "failure")["network to the driver"]
    assert f":{port}: " in text
    assert "hub_port" in text
