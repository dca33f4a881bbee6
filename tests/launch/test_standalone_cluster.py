"""A standalone cluster whose executors come and go, as its shuffle service allows, and copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from support.cluster import Cluster, cluster_on
from support.machines import machines_apart, why_not_apart
from support.managed import LOOP, ManagedSession, come_and_go, of_services

WHY_NOT = why_not_apart()
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

SERVICE = "spark.shuffle.service.enabled"
SERVICES = of_services(SERVICE)
SPECULATION = {
    "spark.executor.cores": "2",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.task.duration.threshold": "1s",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster of two workers of two cores each, with Spark's external shuffle service."""
    folder = tmp_path_factory.mktemp("cluster")
    options = f"-D{SERVICE}=true"
    with (
        machines_apart(4) as machines,
        cluster_on(machines, folder, cores=2, worker_options=options) as cluster,
    ):
        yield cluster


@contextlib.contextmanager
def session_on(cluster: Cluster, **conf: str) -> Iterator[ManagedSession]:
    with cluster.driver(LOOP, **conf) as driver:
        driver.receive("ready")
        yield ManagedSession(driver, cluster.mark)


@pytest.mark.parametrize("service", SERVICES)
def test_executors_come_for_a_run_and_go(cluster: Cluster, service: str) -> None:
    conf, least = SERVICES[service]
    with session_on(cluster, **conf) as session:
        lines = come_and_go(session, least)
        print(f"standalone | {service} | {lines}")


def test_copies_that_spark_starts_of_slow_tasks_do_nothing(cluster: Cluster) -> None:
    with session_on(cluster, **SPECULATION) as session:
        copies, values = session.run("""
            import os

            def train(folder):
                import os, pathlib, time
                import torch, torch.distributed as dist
                dist.init_process_group("gloo")
                total = torch.ones(())
                dist.all_reduce(total)
                while not os.path.exists(folder):
                    time.sleep(0.05)
                return [total.item(), os.environ["TORCHELASTIC_RESTART_COUNT"]]

            def running():
                tracker = spark.sparkContext.statusTracker()
                stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
                return sum(stage.numActiveTasks for stage in stages if stage)

            enough = f"{os.getcwd()}/enough"
            run = ranks(2, barrier=False).submit_all(train, enough)
            deadline = time.monotonic() + 60
            while running() < 4 and time.monotonic() < deadline:
                time.sleep(0.05)
            copies = running() - 2
            open(enough, "w").close()
            result = copies, run.result()
        """)
    assert copies == 2, "Spark started no copies"
    assert values == [[2, "0"]] * 2
