"""What is particular to Kubernetes: pods that wait, and pods that are deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.conf_files import pod_template
from support.managed import (
    AT_ONCE,
    Failed,
    Manager,
    manager,
    why_missing,
)

WHY = why_missing("kubernetes")
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.skipif(bool(WHY), reason=WHY)]


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Manager:
    return manager("kubernetes", tmp_path_factory.mktemp("kubernetes"))


def test_a_wait_for_a_pod_that_does_not_start(kubernetes: Manager) -> None:
    image = {"spark.kubernetes.container.image": "missing-image"}
    with kubernetes.session(1, **AT_ONCE, **image) as session, pytest.raises(Failed) as caught:
        session.run("ranks(1, start_timeout=5).run(print)")
    assert caught.value.kind == "StartTimeout", caught.value
    assert "No executor has registered. Each asks for" in caught.value.message


@pytest.mark.skipif(
    os.environ.get("KUBERNETES_PYTHON", "").startswith("/tmp/"),
    reason="the volume at /tmp hides the image's interpreter",
)
def test_the_pod_template(kubernetes: Manager, tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(json.dumps(pod_template()))
    conf = {
        "spark.kubernetes.executor.podTemplateFile": str(file),
        "spark.kubernetes.executor.podTemplateContainerName": "executor",
    }
    with kubernetes.session(2, **conf) as session:
        assert session.run("result = ranks(2, start_timeout=60).run_all(lambda: 1)") == [1, 1]
