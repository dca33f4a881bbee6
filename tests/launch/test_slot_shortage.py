"""Messages while a run waits for slots that a real cluster does not have."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, cluster_on
from support.machines import machines_on_loopback
from support.waiting import until

from distributor import TorchDistributor
from distributor.errors import StartTimeout

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PROGRAM = """
try:
    TorchDistributor(2, local_mode=False, use_gpu={use_gpu}, start_timeout={seconds}).run(print)
except BaseException as error:
    send(error=type(error).__name__, message=str(error))
"""
GPUS = "spark.executor.resource.gpu.amount"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster of two workers, each of one core and 600 MiB, without GPUs."""
    folder = tmp_path_factory.mktemp("cluster")
    with machines_on_loopback(4) as machines, cluster_on(machines, folder) as cluster:
        yield cluster


def test_without_an_executor_its_size_is_named(cluster: Cluster) -> None:
    conf = {"spark.executor.memory": "64g", "spark.executor.cores": "4", GPUS: "2"}
    source = PROGRAM.format(use_gpu=True, seconds=15)
    with cluster.driver(source, **conf, **{"spark.task.resource.gpu.amount": "1"}) as driver:
        facts = driver.receive("error")
        shown = driver.log.read_text()
    message = facts["message"]
    assert facts["error"] == "StartTimeout", facts
    assert f"Waiting: {message}" in shown
    assert "2 barrier tasks are wanted at once" in message
    assert "No executor has registered. Each asks for 4 cores, 64g of memory and 2 GPUs." in message


def test_executors_that_cannot_reach_the_driver_are_reported(cluster: Cluster) -> None:
    elsewhere = {"spark.driver.host": "127.99.99.99"}
    source = PROGRAM.format(use_gpu=False, seconds=40)
    with cluster.driver(source, **elsewhere) as driver:
        facts = driver.receive("error")
        lines = driver.log.read_text().splitlines()
    assert facts["error"] == "StartTimeout", facts
    ended = r"executors? ended during this wait; the last one(?: on 127\.\S+)?: Command exited with"
    assert re.search(ended, facts["message"]), facts
    assert re.search(r"in work/app-\S+/\d+/stderr", facts["message"])
    assert "spark.driver.host=127.99.99.99, which must be an address of this" in facts["message"]
    waiting = [line for line in lines if line.startswith("Waiting: ")]
    assert any("ended during this wait" in line for line in waiting), lines
    assert len(waiting) == len(set(waiting)), "a message that says nothing new is not shown again"


def test_slots_that_other_jobs_of_the_application_hold_are_named(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context, enough = spark.sparkContext, tmp_path / "enough"

    def hold(_: int) -> None:
        while not enough.exists():
            time.sleep(0.05)

    def running() -> int:
        stages = map(
            context.statusTracker().getStageInfo, context.statusTracker().getActiveStageIds()
        )
        return sum(stage.numActiveTasks for stage in stages if stage)

    job = threading.Thread(target=context.parallelize(range(4), 4).foreach, args=[hold])
    job.start()
    try:
        until(lambda: running() == 4, "all slots are held", 60)
        runner = TorchDistributor(2, local_mode=False, use_gpu=False, start_timeout=12)
        with pytest.raises(StartTimeout) as raised:
            runner.run(print)
    finally:
        enough.touch()
        job.join()

    assert "Spark has started none of the 2 tasks of this run" in str(raised.value)
    assert "Other jobs of this application run 4 tasks" in str(raised.value)
    shown = capsys.readouterr().err
    assert "Waiting: Spark has started none of the 2 tasks" in shown
    assert "Started" not in shown
