"""`distributor.doctor` on the session's Spark."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port

import distributor
from distributor.diagnosis.report import Check, Report

pytestmark = pytest.mark.spark
ON_EXECUTORS = {"executors", "versions", "network to the driver", "network between executors"}


def by_name(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def names(report: Report, status: str) -> set[str]:
    return {check.name for check in report.checks if check.status.value == status}


def test_a_sound_cluster_has_no_failure(spark: Any, tmp_path: Path) -> None:
    report = distributor.doctor(2, local_mode=False, storage_path=tmp_path)

    assert not report.failures, report
    assert ON_EXECUTORS | {"slots", "clock", "storage", "all-reduce"} < names(report, "ok")
    assert "2 executors" in by_name(report.checks)["executors"].found
    assert "2 ranks" in by_name(report.checks)["all-reduce"].found
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert spark.range(3).count() == 3, "the session still works"


def test_too_few_slots(spark: Any) -> None:
    report = distributor.doctor(9, local_mode=False)

    assert list(by_name(report.failures)) == ["slots"], report
    check = by_name(report.failures)["slots"]
    assert "9 barrier tasks are wanted at once" in check.found
    assert "have room for 4" in check.found
    assert "spark.executor.instances" in check.fix
    assert names(report, "ok") >= ON_EXECUTORS, "the executors that are there are examined"
    assert "all-reduce" in names(report, "not checked")


def test_gpus_that_the_session_does_not_have(spark: Any) -> None:
    report = distributor.doctor(local_mode=False, gpus=2)

    assert list(by_name(report.failures)) == ["GPUs"], report
    assert "spark.task.resource.gpu.amount" in by_name(report.failures)["GPUs"].found
    assert "conf/spark-defaults-gpu.conf" in by_name(report.failures)["GPUs"].fix
    assert names(report, "not checked") >= ON_EXECUTORS | {"all-reduce"}


@pytest.fixture
def encrypted(spark: Any) -> Iterator[Any]:
    spark.conf.set("spark.ssl.enabled", "true")
    yield spark
    spark.conf.unset("spark.ssl.enabled")


def test_encryption_that_is_required(encrypted: Any) -> None:
    report = distributor.doctor(2, local_mode=False)

    assert list(by_name(report.failures)) == ["encryption"], report
    assert "spark.ssl.enabled is true" in by_name(report.failures)["encryption"].found
    assert "pytorch.spark.distributor.ignoreSsl" in by_name(report.failures)["encryption"].fix


def test_mlflows_server_is_down_for_all(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)

    report = distributor.doctor(2, local_mode=False)

    assert {check.name for check in report.failures} == {"MLflow"}, report
    assert len(report.failures) == 2, "on the driver, and on the executors"
    assert all(f"{uri} does not answer" in check.found for check in report.failures)


def test_a_hub_port_that_is_taken(spark: Any) -> None:
    with socket.create_server((spark.conf.get("spark.driver.host"), 0)) as taken:
        port = taken.getsockname()[1]
        report = distributor.doctor(2, local_mode=False, hub_port=port)

    check = by_name(report.failures)["network to the driver"]
    assert f"port {port}" in check.found
    assert "hub_port" in check.fix
