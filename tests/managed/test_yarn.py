"""What is particular to YARN: its applications, queues, GPUs and deploy modes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from support.cluster import spark_home
from support.conf_files import CONF, TRAIN, properties
from support.managed import (
    AT_ONCE,
    SECONDS,
    Failed,
    Manager,
    gpus_of_a_node,
    manager,
    nearly_a_node,
    why_missing,
)

WHY = why_missing("yarn")
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.skipif(bool(WHY), reason=WHY)]

KILL = """
import threading
import distributor

def train():
    import threading
    threading.Event().wait()

def kill_once_it_runs():
    while not distributor.stacks():
        time.sleep(0.1)
    client, records = yarn_client()
    application = records.ApplicationId.fromString(spark.sparkContext.applicationId)
    client.killApplication(application)

threading.Thread(target=kill_once_it_runs).start()
ranks(2, max_failures={max_failures}).run(train)
"""


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Manager:
    return manager("yarn", tmp_path_factory.mktemp("yarn"))


def test_an_application_with_too_many_failures(yarn: Manager) -> None:
    conf = {"spark.executor.maxNumFailures": "1", "spark.yarn.maxAppAttempts": "1"}
    with yarn.session(2, **conf) as session, pytest.raises(Failed) as caught:
        session.run("""
            def train():
                import os, threading
                if os.environ["RANK"] == "1":
                    executor_of_rank().kill()
                threading.Event().wait()

            ranks(2, max_failures=5).run(train)
        """)
    assert caught.value.kind == "ApplicationEnded", caught.value
    assert "Max number of executor failures (1) reached" in caught.value.message
    assert "raise it for the next session" in caught.value.message


def test_a_wait_for_room_and_an_application_that_is_killed(yarn: Manager) -> None:
    with yarn.session(100, **AT_ONCE, **nearly_a_node()) as session:
        with pytest.raises(Failed) as caught:
            session.run("ranks(100, start_timeout=5).run(print)")
        assert caught.value.kind == "StartTimeout", caught.value
        assert "are wanted at once" in caught.value.message
        for source in (KILL.format(max_failures=2), "ranks(2).run(print)"):
            began = time.monotonic()
            with pytest.raises(Failed) as caught:
                session.run(source)
            assert caught.value.kind == "ApplicationEnded", caught.value
            assert "YARN reports KILLED: " in caught.value.message
            assert "was killed by user" in caught.value.message
        assert time.monotonic() < began + 30, "the second run did not start"


@pytest.mark.skipif(
    bool(WHY) or gpus_of_a_node("yarn") < 2, reason="no node of the cluster has two GPUs"
)
@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_the_properties_file_as_its_header_says(yarn: Manager, tmp_path: Path, mode: str) -> None:
    values = {
        "spark.pyspark.python": yarn.environment["PYSPARK_PYTHON"],
        "spark.files": str(CONF / "get_gpus.sh"),
    }
    further = {key: yarn.properties[key] for key in ("spark.yarn.jars", "spark.yarn.am.memory")}
    text = properties("spark-defaults-yarn.conf", tmp_path, values, further)
    file, script = tmp_path / "spark.conf", tmp_path / "train.py"
    file.write_text(text)
    script.write_text(TRAIN)
    environment = {**os.environ, "PYTHONPATH": str(CONF.parent)}
    environment.pop("PYSPARK_PYTHON", None)  # the file has it
    done = subprocess.run(
        [
            f"{spark_home()}/bin/spark-submit",
            *("--master", "yarn", "--deploy-mode", mode, "--driver-memory", "512m"),
            *("--properties-file", str(file), str(script), yarn.storage),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
