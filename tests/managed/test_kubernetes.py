"""What is particular to Kubernetes: pods that wait, and pods that are deleted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import spark_home
from support.conf_files import CONF, TRAIN, pod_template, properties
from support.managed import (
    AT_ONCE,
    SECONDS,
    Failed,
    ManagedSession,
    Manager,
    gpus_of_a_node,
    manager,
    why_missing,
)

WHY = why_missing("kubernetes")
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.skipif(bool(WHY), reason=WHY)]


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Manager:
    return manager("kubernetes", tmp_path_factory.mktemp("kubernetes"))


@pytest.fixture(scope="module")
def waiting(kubernetes: Manager) -> Iterator[ManagedSession]:
    """Start a session whose executor never starts."""
    with kubernetes.session(
        1, **AT_ONCE, **{"spark.kubernetes.container.image": "missing-image"}
    ) as session:
        yield session


def test_a_wait_for_a_pod_that_does_not_start(waiting: ManagedSession) -> None:
    with pytest.raises(Failed) as caught:
        waiting.run("ranks(1, start_timeout=5).run(print)")
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


GPUS = gpus_of_a_node("kubernetes")
STORAGE = os.environ.get("KUBERNETES_STORAGE", "")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder that pods have too, with all that a submission needs."""
    folder = Path(tempfile.mkdtemp(dir=STORAGE))
    folder.chmod(0o755)
    shutil.copy(CONF / "get_gpus.sh", folder)
    (folder / "train.py").write_text(TRAIN)
    (folder / "pod.yaml").write_text(json.dumps(pod_template(GPUS)))
    yield folder
    shutil.rmtree(folder)


def write_properties(kubernetes: Manager, files: Path, **further: str) -> Path:
    given = ("spark.kubernetes.container.image", "spark.kubernetes.namespace")
    values = {key: kubernetes.properties[key] for key in given}
    values["spark.kubernetes.container.image.pullPolicy"] = "IfNotPresent"
    values["spark.kubernetes.executor.podTemplateFile"] = str(files / "pod.yaml")
    values["spark.executor.resource.gpu.discoveryScript"] = str(files / "get_gpus.sh")
    values["spark.pyspark.python"] = kubernetes.environment["PYSPARK_PYTHON"]
    volume = "volumes.hostPath.storage"
    for key in ("mount", "options"):
        for role in ("driver", "executor"):
            further[f"spark.kubernetes.{role}.{volume}.{key}.path"] = STORAGE
    file = files / "spark.conf"
    file.write_text(properties("spark-defaults-kubernetes.conf", files, values, further))
    return file


with_gpus = pytest.mark.skipif(
    GPUS < 2 or not STORAGE.startswith("/"), reason="no GPUs, or no folder of the node"
)


@with_gpus
def test_the_properties_file_in_cluster_mode(kubernetes: Manager, files: Path) -> None:
    further = {"spark.kubernetes.driverEnv.PYTHONPATH": str(CONF.parent)}
    master = kubernetes.properties["spark.master"]
    further["spark.kubernetes.driver.master"] = master.removeprefix("k8s://")
    file = write_properties(kubernetes, files, **further)
    done = subprocess.run(
        [
            f"{spark_home()}/bin/spark-submit",
            *("--master", master, "--deploy-mode", "cluster", "--driver-memory", "512m"),
            *("--properties-file", str(file), f"local://{files}/train.py", STORAGE),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "exit code: 0" in done.stderr, done.stderr[-8000:]
