"""The GPUs that each rank sees on Spark clusters and local masters."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark
import pytest
from support.cluster import cluster_on
from support.gpus import (
    DRIVER,
    TOO_MANY_PROCESSES,
    RunGpuDriver,
    check_gpus,
    check_numbers,
    cluster_conf,
    local_conf,
)
from support.machines import machines_on_loopback

from distributor import TorchDistributor

UNSET = "'spark.task.resource.gpu.amount' was unset, so gpu usage is unavailable"
NOT_A_NUMBER = (
    "Found GPU addresses ['GPU-abc'] which are not all in the correct format for "
    "CUDA_VISIBLE_DEVICES, which requires integers with no zero padding."
)


@pytest.mark.spark
def test_each_task_sees_the_gpus_that_spark_assigned(
    run_gpu_driver: RunGpuDriver, make_discovery_script: Callable[..., str]
) -> None:
    facts, _ = run_gpu_driver(
        """
        facts["3"] = error_of(TorchDistributor, 3, local_mode=False)
        facts["ranks"] = run_ranks(4)
        """,
        cluster_conf(make_discovery_script("0", "1"))
        | {
            "spark.task.resource.gpu.amount": "2",
            "spark.executorEnv.CUDA_VISIBLE_DEVICES": "4,5",
        },
    )
    check_numbers(facts["ranks"], 4, 2)
    check_gpus(facts["ranks"], 2, {"4", "5"})
    types, message = facts["3"]
    assert types[0] == "RuntimeError"
    assert "'num_processes' value (3) must be a multiple of" in message


@pytest.mark.slow
@pytest.mark.spark
def test_each_rank_has_a_whole_gpu_where_tasks_have_fractions(
    run_gpu_driver: RunGpuDriver, make_discovery_script: Callable[..., str]
) -> None:
    facts, _ = run_gpu_driver(
        """
        import pyspark

        def resources_of_task(_):
            from pyspark import TaskContext
            return sorted(TaskContext.get().resources())

        facts["version"] = int(pyspark.__version__.split(".")[0])
        if facts["version"] >= 4:
            facts["4"] = run_ranks(4)
            facts["3"] = run_ranks(3)
        else:
            facts["error"] = error_of(TorchDistributor, 2, local_mode=False)
        facts["shared"] = run_ranks(4, gpu_sharing=True)
        tasks = spark.sparkContext.parallelize(range(8), 8)
        facts["others"] = tasks.map(resources_of_task).collect()
        """,
        cluster_conf(make_discovery_script("0", "1"))
        | {
            "spark.task.resource.gpu.amount": "0.5",
            "spark.executorEnv.CUDA_VISIBLE_DEVICES": "4,5",
        },
    )
    check_gpus(facts["shared"], 1, {"4", "5"}, 2)
    assert facts["others"] == [["gpu"]] * 8
    if facts["version"] < 4:
        types, message = facts["error"]
        assert types[0] == "RuntimeError"
        assert "'spark.task.resource.gpu.amount' is 0.5" in message
        assert "gpu_sharing" in message
        return
    for ranks, per_task in (("4", 2), ("3", 1)):
        check_numbers(facts[ranks], int(ranks), per_task)
        check_gpus(facts[ranks], per_task, {"4", "5"})


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.skipif(pyspark.__version__ < "4", reason="PySpark 3.5 has no profile for one job")
def test_executors_that_come_for_a_run_give_each_rank_a_whole_gpu(
    tmp_path: Path, make_discovery_script: Callable[..., str]
) -> None:
    gpus = {"amount": "2", "discoveryScript": make_discovery_script("0", "1")}
    options = " ".join(f"-Dspark.worker.resource.gpu.{key}={gpus[key]}" for key in gpus)
    conf = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.executorIdleTimeout": "5s",
        "spark.executor.cores": "2",
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.resource.gpu.amount": "0.5",
        "spark.executorEnv.CUDA_VISIBLE_DEVICES": "4,5",
    }
    source = """
        def shares(_):
            from pyspark import TaskContext
            return sorted(TaskContext.get().resources())

        facts["ranks"] = run_ranks(4, start_timeout=200)
        facts["others"] = spark.sparkContext.parallelize(range(4), 4).map(shares).collect()
        send(facts=facts)
    """
    with machines_on_loopback(4) as machines:
        for worker in machines[2:]:
            worker.environment["SPARK_WORKER_OPTS"] = options
        with (
            cluster_on(machines, tmp_path, cores=2) as cluster,
            cluster.driver(DRIVER + textwrap.dedent(source), **conf) as driver,
        ):
            facts = driver.receive("facts")["facts"]
    check_numbers(facts["ranks"], 4, 2)
    check_gpus(facts["ranks"], 2, {"4", "5"})
    assert facts["others"] == [["gpu"]] * 4


@pytest.mark.slow
@pytest.mark.spark
def test_without_gpus_per_task_the_job_requests_them(
    run_gpu_driver: RunGpuDriver, make_discovery_script: Callable[..., str]
) -> None:
    """PySpark 4 accepts a resource profile for one job; in PySpark 3.5 the lack is an error."""
    facts, _ = run_gpu_driver(
        """
        import pyspark
        from distributor.spark.session import Session
        from pyspark import TaskContext
        from pyspark.resource import ResourceProfileBuilder

        def resources_of_task(_):
            return sorted(TaskContext.get().resources())

        def default_profile():
            return spark.sparkContext._jsc.sc().resourceProfileManager().defaultResourceProfile()

        def slots():
            return spark.sparkContext._jsc.sc().maxNumConcurrentTasks(default_profile())

        def session():
            context = spark.sparkContext
            return {
                "settings": {row.key: row.value for row in spark.sql("SET").collect()},
                "conf": sorted(context.getConf().getAll()),
                "profile": default_profile().id(),
                "slots": slots(),
                "resources": context.parallelize(range(4), 4).map(resources_of_task).collect(),
            }

        facts["version"] = int(pyspark.__version__.split(".")[0])
        if facts["version"] >= 4:
            while slots() < 4:  # until both executors have started
                time.sleep(0.1)
            facts["before"] = session()
            for num_processes in (3, 4):
                facts[str(num_processes)] = run_ranks(num_processes)
            facts["2 to 4"] = run_ranks((2, 4))
            facts["6"] = error_of(run_ranks, 6, start_timeout=2)
            facts["after"] = session()
            profiles = [Session(each).profile(2) for each in (spark, spark.newSession())]
            facts["profiles"] = [each.id for each in (*profiles, ResourceProfileBuilder().build)]
        else:
            facts["error"] = error_of(TorchDistributor, 2, local_mode=False)
        facts["cpu"] = run_ranks(2, use_gpu=False)
        """,
        cluster_conf(make_discovery_script("0", "1"))
        | {"spark.executorEnv.CUDA_VISIBLE_DEVICES": "4,5"},
    )
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in facts["cpu"]] == ["", ""]
    if facts["version"] < 4:
        types, message = facts["error"]
        assert types[0] == "RuntimeError"
        assert message.startswith(UNSET)
        assert "'spark.executor.resource.gpu.amount' is 2" in message
        return
    runs = (("3", 3, 1), ("4", 4, 2), ("2 to 4", 4, 2))
    for run, num_processes, per_task in runs:
        check_numbers(facts[run], num_processes, per_task)
        check_gpus(facts[run], per_task, {"4", "5"})
    types, message = facts["6"]
    assert types[0] == "StartTimeout"
    assert "3 barrier tasks are wanted at once" in message
    assert "have room for 2" in message
    assert re.search(r"Spark has 2 executors, each of .+, on \d+\.\S+\d\. ", message), message
    assert facts["before"]["resources"] == [[]] * 4
    assert facts["after"] == facts["before"]
    assert facts["profiles"] == [2, 2, 3], (
        "one profile for one GPU, one for two GPUs, then the new one"
    )


@pytest.mark.slow
@pytest.mark.spark
def test_a_local_master_uses_the_gpus_of_the_driver(
    run_gpu_driver: RunGpuDriver, make_discovery_script: Callable[..., str]
) -> None:
    facts, stderr = run_gpu_driver(
        """
        facts["distributed"] = run_ranks(2)
        facts["three"] = error_of(TorchDistributor, 3, local_mode=False)
        distributor = TorchDistributor(4, local_mode=True)
        facts["num_processes"] = distributor.num_processes
        facts["local"] = distributor.run_all(rank_facts)
        os.environ["CUDA_VISIBLE_DEVICES"] = "4,5"
        facts["distributed, mask"] = run_ranks(2)
        facts["distributed, cpu"] = run_ranks(2, use_gpu=False)
        facts["local, mask"] = run_ranks(2, local_mode=True)
        facts["mask"] = os.environ["CUDA_VISIBLE_DEVICES"]
        """,
        local_conf(make_discovery_script("0", "1"), gpus=2),
    )

    def gpus(name: str) -> list[str]:
        return [rank["CUDA_VISIBLE_DEVICES"] for rank in facts[name]]

    check_numbers(facts["distributed"], 2, per_task=1)
    assert gpus("distributed") == ["0", "1"]
    types, message = facts["three"]
    assert types[0] == "RuntimeError"
    assert message.startswith("On local[2] the driver needs a GPU for each of the 3 ranks")
    assert facts["num_processes"] == 2
    assert stderr.count(TOO_MANY_PROCESSES) == 1
    check_numbers(facts["local"], 2, per_task=2)
    assert gpus("local") == ["0,1", "0,1"]
    assert gpus("distributed, mask") == ["4", "5"]
    assert gpus("distributed, cpu") == ["", ""]
    assert gpus("local, mask") == ["4,5", "4,5"]
    assert facts["mask"] == "4,5"


@pytest.mark.slow
@pytest.mark.spark
def test_gpus_per_task_on_a_local_master_are_refused(
    run_gpu_driver: RunGpuDriver, make_discovery_script: Callable[..., str]
) -> None:
    """Spark itself would let the job wait forever; the driver program has a deadline."""
    facts, _ = run_gpu_driver(
        """
        facts["distributed"] = error_of(run_ranks, 1)
        facts["local"] = error_of(run_ranks, 1, local_mode=True)
        """,
        local_conf(make_discovery_script("GPU-abc"), gpus=1)
        | {"spark.executor.resource.gpu.amount": "1", "spark.task.resource.gpu.amount": "1"},
    )
    types, message = facts["distributed"]
    assert types[0] == "RuntimeError"
    assert message.startswith(
        "'spark.task.resource.gpu.amount' is set, but a local[2] master cannot"
    )
    types, message = facts["local"]
    assert types[0] == "ValueError"
    assert message.startswith(NOT_A_NUMBER)


@pytest.mark.spark
def test_a_cluster_without_gpus(spark: Any) -> None:
    with pytest.raises(RuntimeError, match=f"^{UNSET}.*executor.resource.gpu.amount' is unset too"):
        TorchDistributor(2, local_mode=False)
    ranks = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120)
    assert ranks.run_all(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == ["", ""]
