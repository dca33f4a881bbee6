"""Canaries for what `distributor._compat.pyspark` uses of PySpark and Spark."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import needs_java
from support.canary import relies_on
from support.waiting import until

from distributor._compat import pyspark as private
from distributor._compat import pyspark as pyspark_ml
from distributor._compat.pyspark import executor_of

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


def unchanged_rows(spark: Any) -> Any:
    """Plan a job that returns its rows; its function is local, so that it is pickled by value."""

    def same(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    with private.python_executable(spark.sparkContext, sys.executable):
        return spark.range(0, 1, numPartitions=1).mapInArrow(same, "id long")


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
    what = "the task scheduler's getExecutorDecommissionState"
    with relies_on("pyspark", what, "pyspark.decommissioned_executors"):
        assert private.decommissioned_executors(context, [*ids, "no such one"]) == []


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


def test_a_function_runs_with_another_interpreter(spark: Any, context: Any) -> None:
    usual = context.pythonExec
    with private.python_executable(context, "/no/such/python"):
        frame = spark.range(0, 1, numPartitions=1).mapInArrow(lambda batches: batches, "id long")
    with relies_on("pyspark", "SparkContext.pythonExec", "pyspark.python_executable"):
        assert context.pythonExec == usual
        with pytest.raises(Exception, match="/no/such/python"):
            frame.collect()
    with relies_on("pyspark", "SparkContext._temp_dir", "pyspark.temporary_folder"):
        assert Path(private.temporary_folder(context)).is_dir()


def test_files_of_spark_are_found_in_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import SparkFiles

    with relies_on("pyspark", "what SparkFiles knows in a worker", "pyspark.find_spark_files"):
        for name in ("_root_directory", "_is_running_on_worker"):
            monkeypatch.setattr(SparkFiles, name, getattr(SparkFiles, name))
        assert SparkFiles.__module__ in private.MODULES_OF_SPARK_FILES
        private.find_spark_files(sys.modules[SparkFiles.__module__], "/folder")
        assert SparkFiles.get("name") == "/folder/name"


def test_a_job_keeps_its_call_site(spark: Any, context: Any) -> None:
    names: list[str] = []
    tracker = context.statusTracker()

    def collect() -> None:
        context.addJobTag("call site")
        context.setLocalProperty(private.CALL_SITE, "train.py:42")
        context.setLocalProperty(private.CALL_SITE_DETAILS, "train at train.py:42")
        frame = unchanged_rows(spark)
        private.keep_call_site(frame)
        frame.collect()
        jobs = map(tracker.getJobInfo, private.jobs_with_tag(context, "call site"))
        names.extend(tracker.getStageInfo(stage).name for job in jobs for stage in job.stageIds)

    thread = threading.Thread(target=collect)  # local properties are the thread's
    thread.start()
    thread.join()
    what = "DataFrame._sc, SparkContext._jsc.setCallSite or the local properties of call sites"
    with relies_on("pyspark", what, "pyspark.keep_call_site"):
        assert set(names) == {"train.py:42"}


def test_the_log_is_recorded(context: Any) -> None:
    name = private.APPLICATION_LOGGER
    with relies_on("pyspark", "the JVM's Log4j 2", "pyspark.RecordedLog"):
        logger = context._jvm.org.apache.logging.log4j.LogManager.getLogger(name)
        usual = logger.getLevel().name()
        recorded = private.RecordedLog(context, name)
        try:
            logger.debug("too fine")
            logger.info("Lost task 0.0 in stage 3.0\nby")
        finally:
            recorded.close()
        logger.error("too late")
        assert [line.split()[-1] for line in recorded.text.splitlines()] == ["3.0", "by"]
        assert logger.getLevel().name() == usual


def test_py4j_logs_interrupted_calls() -> None:
    from py4j import clientserver, java_gateway

    with relies_on("py4j", "what it logs of interrupted calls", "pyspark.INTERRUPTED"):
        source = inspect.getsource(java_gateway) + inspect.getsource(clientserver)
        texts = [text for texts in private.INTERRUPTED.values() for text in texts]
        assert [text for text in texts if f'"{text}"' not in source] == []


def test_the_progress_bar_can_be_hidden(
    context: Any, run_driver: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    what = "SparkContext.progressBar of the JVM, or ConsoleProgressBar.lastFinishTime"
    with relies_on("pyspark", what, "pyspark.ProgressBar"):
        assert private.progress_bar(context) is None
        done = run_driver(
            """
            import os, sys, time
            from pyspark import SparkConf, SparkContext
            from distributor._compat.pyspark import progress_bar

            os.environ["PYSPARK_PYTHON"] = sys.executable
            conf = SparkConf().setMaster("local[1]").setAppName("tests")
            conf.set("spark.ui.enabled", "false").set("spark.ui.showConsoleProgress", "true")
            context = SparkContext(conf=conf)
            bar = progress_bar(context)
            bar.hide(60)
            for _ in range(2):
                print("JOB", file=sys.stderr, flush=True)
                context.parallelize([2], 1).map(time.sleep).collect()
            """
        )
        _, hidden, shown = done.stderr.split("JOB\n")
        assert "[Stage" not in hidden
        assert "[Stage" in shown


def test_pandas_3_makes_pyspark_warn(spark: Any) -> None:
    pandas = pytest.importorskip("pandas")
    if int(pandas.__version__.partition(".")[0]) < 3 or spark.version.startswith("4.0."):
        pytest.skip("PySpark 4.1 and later warn of pandas 3")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        unchanged_rows(spark)
    with relies_on("pyspark", "its warning of pandas 3", "pyspark.PANDAS_WARNING"):
        (message,) = {str(each.message) for each in shown if each.category is FutureWarning}
        assert re.match(private.PANDAS_WARNING, message)


@pytest.mark.skipif(find_spec("grpc") is None, reason="Spark Connect is not installed")
def test_a_connect_session_is_recognized(spark: Any) -> None:
    from pyspark.sql.connect.session import SparkSession

    with relies_on("pyspark", "the module of Connect's session", "pyspark.is_connect_session"):
        assert private.is_connect_session(SparkSession.__new__(SparkSession))
        assert not private.is_connect_session(spark)


def test_schemas_of_arrow_and_of_spark(spark: Any) -> None:
    import pyarrow as pa
    from pyspark.sql.types import LongType, StructType, TimestampNTZType, TimestampType

    spark_schema = StructType().add("id", LongType())
    spark_schema = spark_schema.add("t", TimestampType()).add("local", TimestampNTZType())
    fields = [("id", pa.int64()), ("t", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us"))]
    arrow_schema = pa.schema(fields)
    with relies_on("pyspark", "pandas.types.to_arrow_schema", "pyspark.arrow_schema"):
        assert private.arrow_schema(spark_schema).equals(arrow_schema)
    with relies_on("pyspark", "pandas.types.from_arrow_schema", "pyspark.spark_schema"):
        assert private.spark_schema(arrow_schema) == spark_schema
    with relies_on("pyspark", "types._parse_datatype_string", "pyspark.parse_type"):
        assert private.parse_type("id long") == StructType().add("id", LongType())
        assert private.parse_type("bigint") == LongType()


def test_stages_of_spark_ml_have_params(spark: Any) -> None:
    from pyspark.ml.param import TypeConverters
    from pyspark.ml.param.shared import HasMaxIter

    class Stage(HasMaxIter):
        size = pyspark_ml.param("size", "a size.", TypeConverters.toInt)

    what = "Params._dummy, _setDefault, _set, _copyValues and _resetUid"
    with relies_on("pyspark", what, "pyspark_ml"):
        one, other = Stage(), Stage()
        pyspark_ml.set_params(one, {"size": 1}, {"maxIter": 2, "size": None})
        pyspark_ml.copy_params(one, other)
        assert other.uid == one.uid
        assert other.extractParamMap() == {one.size: 1, one.maxIter: 2}
        pyspark_ml.reset_uid(other, "stage")
        assert {param.parent for param in other.params} == {"stage"}


def test_paths_are_in_sparks_file_system(context: Any) -> None:
    with relies_on("pyspark", "SparkContext._jvm and _jsc", "pyspark_ml.qualified"):
        assert pyspark_ml.qualified(context, "/a/b c%20d") == "file:///a/b%20c%2520d"
        assert pyspark_ml.qualified(context, "file:///a") == "file:///a"
