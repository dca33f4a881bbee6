"""Runs on a cluster whose processes are killed or stopped, or whose jobs are cancelled.

The tests share a cluster: its master and workers survive them all.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.cluster import Cluster, cluster_on, kill
from support.machines import machines_apart, why_not_apart
from support.two_machines import NOTICED, STOPS_ITSELF, Training, address_of, agent_of
from support.waiting import alive, assert_gone

pytestmark = [pytest.mark.slow, pytest.mark.spark]

WHY_NOT = why_not_apart()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


BARRIER, ORDINARY = "", ", barrier=False"
"""Settings of a run in a barrier stage, and of one in the tasks of an ordinary job."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster of two workers of two cores each, of which a training uses one each."""
    folder = tmp_path_factory.mktemp("cluster")
    with machines_apart(4) as machines, cluster_on(machines, folder, cores=2) as cluster:
        yield cluster


@needs_namespaces
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(BARRIER, id="barrier", marks=pytest.mark.slow(ci=True)),
        pytest.param(ORDINARY, id="ordinary"),
    ],
)
def test_a_partitioned_node_ends_the_run_and_stops_its_ranks(
    cluster: Cluster, tmp_path: Path, settings: str
) -> None:
    training = Training(cluster, tmp_path / "ranks", settings)
    with training.start() as driver:
        ranks = training.await_ranks()
        by_machine = {address_of(rank): rank for rank in ranks}
        machine = cluster.on_workers[0]
        try:
            machine.cut()
            cut_at = time.time()

            report = driver.receive("error", NOTICED + 10)

            assert report["error"] == "NodeLost"
            assert "no sign of life" in report["message"]
            assert report["at"] - cut_at < NOTICED
            assert_gone([by_machine[machine.address]], STOPS_ITSELF)
        finally:
            machine.mend()
        assert_gone(ranks)


@needs_namespaces
@pytest.mark.parametrize(
    ("role", "settings"),
    [
        *(
            pytest.param(role, settings, marks=pytest.mark.slow(ci=True))
            for role in ("driver", "executor")
            for settings in (BARRIER, ORDINARY)
        ),
        *((role, BARRIER) for role in ("agent", "driver_jvm", "rank", "zygote")),
    ],
)
def test_a_killed_process_leaves_nothing_of_the_run(
    cluster: Cluster, tmp_path: Path, role: str, settings: str
) -> None:
    training = Training(cluster, tmp_path / "ranks", settings)
    with training.start() as driver:
        ranks = training.await_ranks()
        doomed = {
            "rank": lambda: ranks[1],
            "agent": lambda: agent_of(cluster, ranks[1]),
            "driver": lambda: psutil.Process(driver.process.pid),
        }.get(role, lambda: cluster.find(role)[0])()
        at = kill(doomed)
        if role == "zygote":
            assert alive(ranks) == ranks, "the ranks no longer need it"
            return
        if role != "driver":
            report = driver.receive("error", 30)
            assert report["at"] - at < 15
            assert ("SIGKILL" in report["message"]) == (role == "rank")
        assert_gone(training.started)


@needs_namespaces
@pytest.mark.parametrize(
    ("command", "error", "settings"),
    [
        ("spark.sparkContext.cancelAllJobs()", "DistributorError", BARRIER),
        ("spark.sparkContext.cancelJobGroup('of this test')", "DistributorError", ORDINARY),
        ("spark.stop()", "ApplicationEnded", BARRIER),
    ],
)
def test_a_job_cancelled_by_spark_ends_the_run(
    cluster: Cluster, tmp_path: Path, command: str, error: str, settings: str
) -> None:
    training = Training(cluster, tmp_path / "ranks", settings)
    with training.start() as driver:
        training.await_ranks()
        driver.send(command)
        assert driver.receive("error", 30)["error"] == error
        assert_gone(training.started)


@needs_namespaces
def test_a_stopped_agent_ends_the_run(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "ranks")
    with training.start() as driver:
        ranks = training.await_ranks()
        agent = agent_of(cluster, ranks[1])
        agent.send_signal(signal.SIGSTOP)

        report = driver.receive("error", NOTICED + 10)

        assert report["error"] == "NodeLost"
        assert_gone(ranks[:1])


@needs_namespaces
@pytest.mark.parametrize(
    ("what", "seconds", "settings"), [("driver", 15.0, BARRIER), ("node", 5.0, ORDINARY)]
)
def test_a_run_survives_a_stop_of_some_seconds(
    cluster: Cluster, tmp_path: Path, what: str, seconds: float, settings: str
) -> None:
    """The driver is stopped as long as a garbage collection may take, or a machine migrates."""
    training = Training(cluster, tmp_path / "ranks", settings)
    with training.start() as driver:
        ranks = training.await_ranks()
        if what == "driver":
            stopped = [psutil.Process(driver.process.pid), *cluster.find("driver_jvm")]
        else:
            stopped = [agent_of(cluster, ranks[1]), ranks[1]]
        for process in stopped:
            process.suspend()
        time.sleep(seconds)
        for process in stopped:
            process.resume()
        time.sleep(NOTICED)
        training.let_end()
        assert driver.receive("value", 30)["value"] == 2 * [str(tmp_path / "ranks")]


@needs_namespaces
def test_of_two_drivers_one_ends_and_the_other_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    doomed, other = (Training(cluster, tmp_path / name) for name in ("doomed", "other"))
    with doomed.start() as doomed_driver, other.start() as others_driver:
        ranks, others = doomed.await_ranks(), other.await_ranks()
        both = [on_machine.address for on_machine in cluster.on_workers]
        assert sorted(map(address_of, ranks)) == sorted(map(address_of, others)) == sorted(both)

        kill(psutil.Process(doomed_driver.process.pid))

        assert_gone(doomed.started)
        assert alive(other.started) == other.started
        other.let_end()
        assert others_driver.receive("value", 30)["value"] == 2 * [str(tmp_path / "other")]


@needs_namespaces
def test_ctrl_c_ends_the_run_and_no_other_job(cluster: Cluster, tmp_path: Path) -> None:
    with_room = {"spark.executor.cores": "2", "spark.cores.max": "4"}  # for the other job
    training = Training(cluster, tmp_path / "ranks", **with_room)
    with training.start() as driver:
        training.await_ranks()
        training.await_ordinary_job()
        at = time.time()
        driver.process.send_signal(signal.SIGINT)

        report = driver.receive("error", 30)

        assert report["error"] == "KeyboardInterrupt"
        assert report["at"] - at < 5
        driver.send("send(active=len(spark.sparkContext.statusTracker().getActiveJobsIds()))")
        assert driver.receive("active", 30)["active"] == 1, "the ordinary job alone"
        assert_gone(training.started)
        training.let_end()
        assert driver.receive("job", 30)["job"] == ["done"]
