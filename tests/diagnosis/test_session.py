"""`distributor.doctor` on the session's Spark."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distributor
from distributor.diagnosis.report import Check, Report

pytestmark = pytest.mark.spark
ON_EXECUTORS = {"run", "versions", "network to the driver", "network between executors"}

ON_ONE_HOST = ON_EXECUTORS - {"network between executors"}


def by_name(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def names(report: Report, status: str) -> set[str]:
    return {check.name for check in report.checks if check.status.value == status}


def test_a_sound_cluster_has_no_failure(spark: Any, tmp_path: Path) -> None:
    report = distributor.doctor(2, local_mode=False, storage_path=tmp_path)

    assert not report.failures, report
    assert ON_ONE_HOST | {"slots", "storage"} < names(report, "ok")
    assert "2 ranks started" in by_name(report.checks)["run"].found
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert spark.range(3).count() == 3, "the session still works"


def test_too_few_slots(spark: Any) -> None:
    report = distributor.doctor(9, local_mode=False)

    assert list(by_name(report.failures)) == ["slots"], report
    check = by_name(report.failures)["slots"]
    assert "9 barrier tasks are wanted at once" in check.found
    assert "have room for 4" in check.found
    assert "spark.executor.instances" in check.fix
    assert names(report, "ok") >= ON_ONE_HOST, "the executors that are there are examined"
    assert "4 ranks started" in by_name(report.checks)["run"].found


def test_a_rank_for_each_executor_by_default(spark: Any) -> None:
    report = distributor.doctor(local_mode=False)

    assert not report.failures, report
    assert "2 ranks started" in by_name(report.checks)["run"].found


def test_gpus_that_the_session_does_not_have(spark: Any) -> None:
    report = distributor.doctor(local_mode=False, gpus=2)

    assert list(by_name(report.failures)) == ["GPUs"], report
    assert "spark.task.resource.gpu.amount" in by_name(report.failures)["GPUs"].found
    assert "conf/spark-defaults-gpu.conf" in by_name(report.failures)["GPUs"].fix
    assert names(report, "not checked") >= ON_EXECUTORS


@pytest.fixture
def encrypted(spark: Any) -> Iterator[Any]:
    spark.conf.set("spark.ssl.enabled", "true")
    yield spark
    spark.conf.unset("spark.ssl.enabled")


def test_encryption_that_is_required(encrypted: Any) -> None:
    report = distributor.doctor(2, local_mode=False)

    assert list(by_name(report.failures)) == ["run"], report
    assert "TLS encryption enabled" in by_name(report.failures)["run"].found
    assert "pytorch.spark.distributor.ignoreSsl" in by_name(report.failures)["run"].found


def test_a_hub_port_that_is_taken(spark: Any) -> None:
    with socket.create_server((spark.conf.get("spark.driver.host"), 0)) as taken:
        port = taken.getsockname()[1]
        report = distributor.doctor(2, local_mode=False, hub_port=port)

    check = by_name(report.failures)["network to the driver"]
    assert f":{port}: " in check.found
    assert "hub_port" in check.fix
    assert "run" in names(report, "not checked")
