"""What is particular to Kubernetes: pods that wait, and pods that are deleted."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.managed import AT_ONCE, Failed, Manager, manager, why_missing
from support.project_files import load_yaml

WHY = why_missing("kubernetes")
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.skipif(bool(WHY), reason=WHY)]


CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Manager:
    return manager("kubernetes", tmp_path_factory.mktemp("kubernetes"))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("spark.executor.cores", "900", "Insufficient cpu"),
        ("spark.kubernetes.container.image", "missing-image", r"ImagePull|pull"),
    ],
)
def test_a_wait_for_pods_has_their_own_reason(
    kubernetes: Manager, key: str, value: str, reason: str
) -> None:
    with (
        kubernetes.session(1, **AT_ONCE, **{key: value}) as session,
        pytest.raises(Failed) as caught,
    ):
        session.run("ranks(1, start_timeout=15).run(print)")
    assert caught.value.kind == "StartTimeout", caught.value
    assert caught.value.message.count("Kubernetes has not started 1 pod (") == 1, caught.value
    assert re.search(reason, caught.value.message), caught.value


def test_a_deleted_pod_is_replaced(kubernetes: Manager) -> None:
    with kubernetes.session(2) as session:
        result = session.run("""
            import threading
            import distributor

            def delete_a_pod():
                while not distributor.stacks():
                    time.sleep(0.1)
                context = spark.sparkContext
                client = context._jsc.sc().schedulerBackend().kubernetesClient()
                namespace = spark.conf.get("spark.kubernetes.namespace")
                pods = client.pods().inNamespace(namespace)
                pods = pods.withLabel("spark-app-selector", context.applicationId)
                [pod] = pods.withLabel("spark-exec-id", "1").list().getItems()
                name = pod.getMetadata().getName()
                client.pods().inNamespace(namespace).withName(name).delete()

            def train():
                import os, threading
                if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    threading.Event().wait()
                return int(os.environ["TORCHELASTIC_RESTART_COUNT"])

            threading.Thread(target=delete_a_pod).start()
            result = ranks(2, max_failures=1).run(train)
        """)
    assert result == 1


def template_without_gpus() -> dict[str, Any]:
    pod: dict[str, Any] = load_yaml(CONF / "executor-pod-template.yaml")
    for key in ("nodeSelector", "tolerations"):
        del pod["spec"][key]
    del pod["spec"]["containers"][0]["resources"]
    return pod


@pytest.mark.skipif(
    os.environ.get("KUBERNETES_PYTHON", "").startswith("/tmp/"),
    reason="the volume at /tmp hides the image's interpreter",
)
@pytest.mark.parametrize("writable", [True, False], ids=["writable", "nothing is mounted"])
def test_the_pod_template(kubernetes: Manager, tmp_path: Path, writable: bool) -> None:
    pod, file = template_without_gpus(), tmp_path / "pod.yaml"
    pod["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] = "1Gi"
    if not writable:
        pod["spec"]["containers"][0]["volumeMounts"] = []
    file.write_text(json.dumps(pod))
    conf = {
        "spark.kubernetes.executor.podTemplateFile": str(file),
        "spark.kubernetes.executor.podTemplateContainerName": "executor",
    }
    with kubernetes.session(2, **conf) as session:
        run = "result = ranks(2, start_timeout=60).run_all(lambda: 1)"
        if writable:
            assert session.run(run) == [1, 1]
            return
        with pytest.raises(Failed, match=r"ExecutorNotReady: .* cannot write \./"):
            session.run(run)
