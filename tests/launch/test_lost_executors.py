"""Why an executor was lost, from the texts of Spark 4.3 on YARN and on Kubernetes."""

from __future__ import annotations

import pickle

import pytest

from distributor.errors import NodeLost
from distributor.spark.error_translation import explain

FAILED = (
    "An error occurred while calling o469.collectToPython.\n: org.apache.spark.SparkException: Job "
    "aborted due to stage failure: Could not recover from a failed barrier ResultStage. Most "
    "recent failure reason: Stage failed because barrier task ResultTask(2, 0) finished "
    "unsuccessfully.\n"
    "ExecutorLostFailure (executor 1 exited {}) Reason: {}\n"
    "\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:4568)\n"
)
BY_TASK, UNRELATED = "caused by one of the running tasks", "unrelated to the running tasks"
POD = """
The executor with id 1 exited with exit code 137(SIGKILL, possible container OOM).


The API gave the following container statuses:


\t container started at: 2026-11-26T13:55:19Z
\t exit code: 137
\t termination reason: OOMKilled
      """
CONTAINER = (
    "Container killed by YARN for exceeding physical memory limits. 2.3 GB of 2 GB physical memory "
    "used. Consider boosting spark.executor.memoryOverhead."
)
PREEMPTED = "Container container_17_0001_01_000002 on host: h was preempted."
DECOMMISSIONED = "Executor decommission: Executor 4 is decommissioned."


def lost(how: str, reason: str) -> NodeLost:
    error = explain(RuntimeError(FAILED.format(how, reason)), 2, "rank 0 on h")
    assert isinstance(error, NodeLost)
    assert "\n" not in str(error)
    assert "The node of rank 0 on h ended" in str(error)
    return error


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        (POD, "137(SIGKILL, possible container OOM). termination reason: OOMKilled."),
        (CONTAINER, "2.3 GB of 2 GB physical memory used."),
    ],
    ids=["kubernetes", "yarn"],
)
def test_a_container_without_memory(reason: str, found: str) -> None:
    error = lost(BY_TASK, reason)
    assert found in str(error)
    assert "larger spark.executor.memoryOverhead" in str(error)
    assert "started at" not in str(error)
    assert error.reclaimed == ()


@pytest.mark.parametrize("reason", [PREEMPTED, DECOMMISSIONED])
def test_an_executor_that_was_taken_back(reason: str) -> None:
    error = lost(UNRELATED, reason)
    assert f"{reason} The cluster manager took it back." in str(error)
    assert "memory" not in str(error)
    assert pickle.loads(pickle.dumps(error)).reclaimed == error.reclaimed == ("h",)
