"""Canaries for what `distributor._compat.pyspark` uses of Spark and few tests would notice."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_java
from support.canary import relies_on
from support.waiting import until

from distributor._compat import pyspark as private
from distributor._compat.spark_executor import executor_of

pytestmark = [pytest.mark.repository, pytest.mark.spark, needs_java]

EXECUTORS, CORES = 2, 2
"""Of the cluster that the fixture ``spark`` starts."""


@pytest.fixture
def context(spark: Any) -> Any:
    """Return the application's context once all of its executors have registered."""
    until(
        lambda: spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() > EXECUTORS,
        "all executors register",
        seconds=120,
    )
    return spark.sparkContext


def test_slots_and_executors_are_counted(context: Any) -> None:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    with relies_on("pyspark", "SparkContext._jsc", "pyspark.java_context"):
        assert private.java_context(context).applicationId() == context.applicationId
    what = "the JVM's maxNumConcurrentTasks, or ResourceProfile._java_resource_profile"
    with relies_on("pyspark", what, "pyspark.max_concurrent_tasks"):
        assert private.max_concurrent_tasks(context) == EXECUTORS * CORES
        profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(CORES)).build
        assert private.max_concurrent_tasks(context, profile) == EXECUTORS
    with relies_on("pyspark", "the JVM's getExecutorInfos", "pyspark.executor_hosts"):
        assert len(private.executor_hosts(context)) == EXECUTORS + 1
    with relies_on("pyspark", "the scheduler backend's getExecutorIds", "pyspark.executor_ids"):
        ids = private.executor_ids(context)
        assert len(ids) == EXECUTORS
    with relies_on("pyspark", "the JVM's status store", "pyspark.executor_host"):
        hosts = {private.executor_host(context, each) for each in ids}
        assert hosts <= set(private.executor_hosts(context))
    what = "the scheduler backend's isExecutorActive"
    with relies_on("pyspark", what, "pyspark.inactive_executors"):
        assert private.inactive_executors(context, [*ids, "no such one"]) == ["no such one"]


def test_a_job_is_found_by_its_tag_and_its_failed_task_is_explained(context: Any) -> None:
    def fail(_: Any) -> Any:
        from pyspark import TaskContext

        raise ValueError(f"the canary's task {TaskContext.get().taskAttemptId()}.")

    context.addJobTag("a-canarys-tag")
    try:
        with pytest.raises(Exception, match="the canary's task") as caught:
            context.parallelize([0], 1).map(fail).collect()
    finally:
        context.removeJobTag("a-canarys-tag")
    with relies_on("pyspark", "the JVM's getJobIdsForTag", "pyspark.jobs_with_tag"):
        [job] = private.jobs_with_tag(context, "a-canarys-tag")
        assert private.jobs_with_tag(context, "no such tag") == []
    [task] = set(re.findall(r"the canary's task (\d+)\.", str(caught.value)))
    with relies_on("pyspark", "the status store's tasks", "pyspark.task_failure"):
        stages = list(context.statusTracker().getJobInfo(job).stageIds)
        until(
            lambda: "the canary's task" in private.task_failure(context, stages, int(task)),
            "the status store has the error",
            30,
        )


def test_a_worker_finds_its_executor(context: Any) -> None:
    def parent(_: Any) -> int:
        import os

        return os.getppid()

    [worker] = context.parallelize([0], 1).map(parent).collect()
    with relies_on("pyspark", "the executors' command line", "spark_executor.executor_of"):
        found = executor_of(worker)
        assert found is not None
        assert found[0]
        assert found[1] in private.executor_ids(context)
    assert executor_of(os.getpid()) is None


def test_arrivals_at_barriers_are_counted(spark: Any, context: Any, tmp_path: Path) -> None:
    """One task waits for the other, and then both pass."""
    may_pass, may_end = tmp_path / "may_pass", tmp_path / "may_end"

    def pass_barrier(batches: Iterator[Any]) -> Iterator[Any]:
        import time

        from pyspark import BarrierTaskContext

        task = BarrierTaskContext.get()
        while task.partitionId() == 0 and not may_pass.exists():
            time.sleep(0.05)
        task.allGather("")
        while not may_end.exists():
            time.sleep(0.05)
        yield from batches

    with private.python_executable(context, sys.executable):
        frame = spark.range(0, 2, numPartitions=2).mapInArrow(pass_barrier, "id long", barrier=True)

    def arrivals() -> tuple[int, int]:
        infos = map(context.statusTracker().getJobInfo, private.jobs_with_tag(context, "a-barrier"))
        stages = {stage for info in infos if info for stage in info.stageIds}
        return private.barrier_arrivals(context, stages)

    def run() -> None:
        context.addJobTag("a-barrier")
        frame.collect()

    job = threading.Thread(target=run)
    job.start()
    try:
        with relies_on("pyspark", "fields of BarrierCoordinator", "pyspark.barrier_arrivals"):
            until(lambda: arrivals() == (1, 0), "a task waits in the barrier", 60)
            assert private.barrier_arrivals(context, {-1}) == (0, 0), "of other jobs"
            may_pass.touch()
            until(lambda: arrivals() == (0, 1), "both have passed it", 60)
    finally:
        may_pass.touch()
        may_end.touch()
        job.join()


def test_the_log_is_recorded_and_messages_are_dropped(context: Any) -> None:
    name, without = private.APPLICATION_LOGGER, "distributor.canary.without.a.level"
    with relies_on("pyspark", "the JVM's Log4j 2", "pyspark.RecordedLog and drop_messages"):
        logger = context._jvm.org.apache.logging.log4j.LogManager.getLogger(name)
        usual = logger.getLevel().name()
        recorded = private.RecordedLog(context, name)
        try:
            logger.debug("too fine")
            for pattern in ("(?s).*stage (3|4)\\..*", "(?s).*stage (4)\\..*", ""):
                private.drop_messages(context, [name, without], pattern)
                for stage in (3, 4, 34):
                    logger.info(f"Lost task 0.0 in stage {stage}.0\nby")
        finally:
            recorded.close()
        logger.error("too late")
        found = [line.split()[-1] for line in recorded.text.splitlines()[::2]]
        assert found == ["34.0", "3.0", "34.0", "3.0", "4.0", "34.0"]
        assert logger.getLevel().name() == usual
    with relies_on("pyspark", "the classes that log errors", "pyspark.TASK_ERROR_LOGGERS"):
        for each in private.TASK_ERROR_LOGGERS:
            context._jvm.java.lang.Class.forName(each)


def test_py4j_logs_interrupted_calls() -> None:
    from py4j import clientserver, java_gateway

    with relies_on("py4j", "what it logs of interrupted calls", "pyspark.INTERRUPTED"):
        source = inspect.getsource(java_gateway) + inspect.getsource(clientserver)
        texts = [text for texts in private.INTERRUPTED.values() for text in texts]
        assert [text for text in texts if f'"{text}"' not in source] == []
