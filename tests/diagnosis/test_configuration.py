"""What `distributor.doctor` finds in the properties of a session on YARN or Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest

from distributor.diagnosis.configuration import configuration_checks
from distributor.spark.session import Session

KUBERNETES = {"spark.master": "k8s://https://api:6443"}
YARN = {"spark.master": "yarn"}
BOUND = {**KUBERNETES, "spark.driver.bindAddress": "0.0.0.0"}
SCRIPT = {**YARN, "spark.executor.resource.gpu.discoveryScript": "get_gpus.sh"}
NO_POD_ADDRESS = {"spark.kubernetes.executor.useDriverPodIP": "false"}
DECOMMISSIONS = {**KUBERNETES, "spark.decommission.enabled": "true"}
GRACE = {"spark.kubernetes.executor.terminationGracePeriodSeconds": "120s"}
OTHER_PYTHON = {**YARN, "spark.executorEnv.PYSPARK_PYTHON": "/opt/other/bin/python"}
LOCAL = {"spark.master": "local[2]"}
CLUSTER_MODE = {"spark.submit.deployMode": "cluster"}


class Properties(Session):
    """A session that has properties only."""

    def __init__(self, properties: dict[str, str]) -> None:
        self.is_connect = False
        self._properties = properties

    def conf(self, key: str) -> Any:
        return self._properties.get(key)


def found(properties: dict[str, str]) -> dict[str, str]:
    """Return the name and status of each check that is not "ok"."""
    checks = configuration_checks(Properties(properties))
    return {check.name: check.status.value for check in checks if check.status.value != "ok"}


@pytest.mark.parametrize(
    ("wrong", "right", "name", "status"),
    [
        (YARN, {"spark.executor.maxNumFailures": "100"}, "executor failures", "warning"),
        (KUBERNETES, {"spark.executor.maxNumFailures": "100"}, "executor failures", "warning"),
        (SCRIPT, {list(SCRIPT)[1]: "./get_gpus.sh"}, "discovery script", "failure"),
        (BOUND, NO_POD_ADDRESS, "driver's address", "failure"),
        (BOUND, CLUSTER_MODE, "driver's address", "failure"),
        (DECOMMISSIONS, GRACE, "grace period", "warning"),
        (OTHER_PYTHON, LOCAL, "PYSPARK_PYTHON", "warning"),
    ],
)
def test_a_property_of_a_cluster_manager(
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, str],
    right: dict[str, str],
    name: str,
    status: str,
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/venv/bin/python")
    assert found(wrong)[name] == status
    assert name not in found({**wrong, **right})


def test_dynamic_allocation() -> None:
    short_barriers = {"spark.barrier.sync.timeout": "30s"}
    limit = {"spark.dynamicAllocation.maxExecutors": "7"}
    properties = {**YARN, **short_barriers, **limit, "spark.dynamicAllocation.enabled": "true"}

    assert not {"dynamic allocation", "barrier"} & found(properties).keys()
    checks = configuration_checks(Properties(properties))
    [check] = [check for check in checks if check.name == "dynamic allocation"]
    assert "ordinary jobs" in check.found
    assert "spark.dynamicAllocation.maxExecutors is 7" in check.found
    assert found({**YARN, **short_barriers})["barrier"] == "failure"
