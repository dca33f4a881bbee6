"""What runs promise, on YARN and on Kubernetes, also after kills and evictions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gpus import write_script
from support.managed import (
    ENDS_IN,
    SECONDS,
    Failed,
    ManagedSession,
    Manager,
    gpus_of_a_node,
    manager,
    nearly_a_node,
    properties_of_hadoop,
    why_missing,
)
from support.waiting import marked, until

pytestmark = [pytest.mark.slow, pytest.mark.spark]

RUN = """
import secrets, subprocess, tempfile, threading
from distributor.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, UserCallback
from distributor.train.torch import TorchTrainer

def loop(config):
    import os, signal
    import torch
    from distributor import train
    rank, first = train.get_context().get_world_rank(), 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            first = torch.load(os.path.join(folder, "step.pt")) + 1
    if first == 0:  # more than the ranks must end
        left = {**os.environ, "DISTRIBUTOR_TEST_MARK": config["mark"]}
        subprocess.Popen(["sleep", "1000"], start_new_session=True, env=left)
    for step in range(first, 3):
        if step == 1 and first == 0 and config["kill"] == "eviction":
            while not train.is_preempted():
                threading.Event().wait(0.1)
        elif step > 0 and first == 0:
            if rank == 1 and config["kill"] == "rank":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1 and config["kill"] == "executor":
                executor_of_rank().kill()
            threading.Event().wait()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(step, os.path.join(folder, "step.pt"))
            facts = {"step": step, "first": first, "container": os.environ.get("CONTAINER_ID")}
            facts["pod"] = os.environ.get("SPARK_EXECUTOR_POD_NAME", os.environ.get("HOSTNAME"))
            train.report(facts, checkpoint=Checkpoint(folder))

class Killer(UserCallback):
    def after_report(self, run_context, metrics, checkpoint):
        times[metrics[0]["first"] > 0].append(time.monotonic())
        if metrics[0]["step"] == 0:
            strike(metrics[1])

    def after_exception(self, run_context, worker_exceptions):
        causes.extend(f"{type(each).__name__}: {each}" for each in worker_exceptions.values())

def strike(facts):
    if kill == "container":
        client, records = yarn_client()
        command = records.SignalContainerCommand.FORCEFUL_SHUTDOWN
        client.signalToContainer(records.ContainerId.fromString(facts["container"]), command)
    if kill in ("pod", "eviction"):
        client = spark._jsc.sc().schedulerBackend().kubernetesClient()
        namespace = spark.conf.get("spark.kubernetes.namespace")
        pod = client.pods().inNamespace(namespace).withName(facts["pod"])
        pod.evict() if kill == "eviction" else pod.delete()
    if kill in ("preemption", "driver"):
        send(struck=True)

times, causes = ([], []), []
preempted = kill in ("eviction", "preemption")
failures = FailureConfig(max_failures=int(not preempted), max_preemption_failures=1)
trainer = TorchTrainer(
    loop,
    train_loop_config={"kill": kill, "mark": mark},
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False, local_mode=False),
    run_config=RunConfig(
        name=secrets.token_hex(4),
        storage_path=storage,
        failure_config=failures,
        callbacks=[Killer()],
    ),
)
done = trainer.fit()
result = {**done.metrics, "seconds": times[1][0] - times[0][0], "causes": causes}
"""
KILLS = {
    "yarn": ["rank", "executor", "container"],
    "kubernetes": ["rank", "executor", "pod", "eviction"],
}


LEAVES_IN_ORDER = {
    "spark.decommission.enabled": "true",
    # Spark asks for another pod only once the old one has ended. Its ranks may use all this time.
    "spark.kubernetes.executor.terminationGracePeriodSeconds": "8s",
}


@pytest.fixture(scope="module", params=list(KILLS))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manager:
    if why := why_missing(request.param):
        pytest.skip(why)
    return manager(request.param, tmp_path_factory.mktemp(request.param))


Start = Callable[[ManagedSession, str], None]


@pytest.fixture
def start(cluster: Manager) -> Iterator[Start]:
    """Return a function that starts the run in a session; at the end nothing of it may be left."""
    if not cluster.storage:
        pytest.skip("KUBERNETES_STORAGE is not set: nothing is known that executors can write to")
    mark = secrets.token_hex(8)

    def start(session: ManagedSession, kill: str) -> None:
        session.send(RUN, kill=kill, mark=mark, storage=cluster.storage)

    yield start
    until(lambda: not marked(mark), "no process of the ranks is left")


def check_cause(cluster: Manager, kill: str, result: Any) -> None:
    """Print a row of the table of kills, which pytest shows with ``-rP``; check the cause."""
    [cause] = result["causes"]
    print(f"{cluster.name} | {kill} | {result['seconds']:.1f} s | {cause[:300]!r}")
    assert ("WorkerDied: " if kill == "rank" else "NodeLost: ") in cause


def check_that_it_resumes(
    cluster: Manager, session: ManagedSession, start: Start, kill: str
) -> None:
    if kill not in KILLS[cluster.name]:
        pytest.skip(f"{cluster.name} has no {kill}")
    start(session, kill)
    result = session.result()
    check_cause(cluster, kill, result)
    assert result["step"] == 2
    assert result["first"] == (2 if kill == "eviction" else 1)


def has_urgent_queue() -> bool:
    scheduler = "yarn.scheduler.capacity.root"
    known = properties_of_hadoop("capacity-scheduler.xml")
    monitored = "yarn.resourcemanager.scheduler.monitor.enable"
    return (
        "urgent" in known.get(f"{scheduler}.queues", "").split(",")
        and known.get(monitored) == "true"
    )


# It needs the room that the session of the tests below would take.
def test_a_preempted_container(cluster: Manager, start: Start) -> None:
    if cluster.name != "yarn" or not has_urgent_queue():
        pytest.skip("no cluster with a queue 'urgent' that preempts is known")
    conf = nearly_a_node()  # two fill the cluster
    with cluster.session(2, **conf) as session:
        start(session, "preemption")
        session.driver.receive("struck", SECONDS)
        with cluster.session(1, **conf, **{"spark.yarn.queue": "urgent"}) as urgent:
            assert urgent.run("result = spark.range(3).count()") == 3
        result = session.result()
    check_cause(cluster, "preemption", result)
    assert (result["step"], result["first"]) == (2, 1)
    assert "was preempted" in result["causes"][0]


def test_a_killed_driver(cluster: Manager, start: Start) -> None:
    with cluster.session() as session:
        start(session, "driver")
        session.driver.receive("struck", SECONDS)
        session.driver.process.kill()
        at = time.monotonic()
        until(lambda: not marked(session.mark), "nothing is left of the session", ENDS_IN)
        print(f"{cluster.name} | driver | nothing left after {time.monotonic() - at:.1f} s")


DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    # EMR and Dataproc have a shuffle service instead, which would keep rows; ranks have none.
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.executorIdleTimeout": "5s",  # instead of a minute
}


def test_executors_come_for_a_run_and_go(cluster: Manager) -> None:
    with cluster.session(None, **DYNAMIC) as session:
        counts = session.run("""
            def count():
                return spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1

            result = [count()]
            for _ in range(2):
                assert ranks(2).run_all(lambda: 1) == [1, 1]
                result.append(count())
                deadline = time.monotonic() + 60
                while count() and time.monotonic() < deadline:
                    time.sleep(0.2)
                result.append(count())
        """)
    assert counts == [0, 2, 0, 2, 0]


def test_each_rank_has_a_whole_gpu_where_tasks_have_fractions(cluster: Manager) -> None:
    if gpus_of_a_node(cluster.name) < 2:
        pytest.skip("no node of the cluster is known to have two GPUs")
    found = json.dumps({"name": "gpu", "addresses": ["0", "1"]})
    folder = cluster.folder if cluster.name == "yarn" else Path(cluster.storage)
    script = write_script(folder, "discover.sh", f"echo '{found}'")
    gpus = {"amount": "2", "discoveryScript": script, "vendor": "nvidia.com"}
    conf = {f"spark.executor.resource.gpu.{key}": value for key, value in gpus.items()}
    conf |= {"spark.task.resource.gpu.amount": "0.5"}
    with cluster.session(2, **conf) as session:
        result = session.run("""
            def gpus():
                import os
                node = os.environ.get("CONTAINER_ID", os.environ.get("HOSTNAME"))
                return node, os.environ["CUDA_VISIBLE_DEVICES"]

            def shares(_):
                from pyspark import TaskContext
                return sorted(TaskContext.get().resources())

            whole = ranks(4, use_gpu=True).run_all(gpus)
            others = spark.sparkContext.parallelize(range(4), 4).map(shares).collect()
            result = {"whole": whole, "others": others}
        """)
    (first, gpus_of_first), _, (second, gpus_of_second), _ = result["whole"]
    assert first != second
    assert gpus_of_first == gpus_of_second == "0,1"
    assert result["others"] == [["gpu"]] * 4


@pytest.fixture(scope="module")
def dynamic_session(cluster: Manager) -> Iterator[ManagedSession]:
    with cluster.session(None, **DYNAMIC, **LEAVES_IN_ORDER) as session:
        yield session


@pytest.mark.parametrize("kill", ["executor", "eviction"])
def test_the_next_attempt_resumes_with_dynamic_allocation(
    cluster: Manager, dynamic_session: ManagedSession, start: Start, kill: str
) -> None:
    check_that_it_resumes(cluster, dynamic_session, start, kill)


@pytest.fixture(scope="module")
def session(cluster: Manager) -> Iterator[ManagedSession]:
    with cluster.session(**LEAVES_IN_ORDER) as session:
        yield session


def test_values_and_output(session: ManagedSession) -> None:
    result = session.run("""
        def train(factor):
            import os
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            total = torch.ones(()) * (dist.get_rank() + 1)
            dist.all_reduce(total)
            return [dist.get_rank(), factor * total.item()]

        result = ranks(2).run_all(train, 2)
    """)
    assert result == [[0, 6], [1, 6]]


def test_a_container_without_memory_says_so(session: ManagedSession) -> None:
    with pytest.raises(Failed) as caught:
        session.run("""
            def train():
                import os, threading
                kept = []
                while os.environ["RANK"] == "0" and len(kept) < 60:  # 3 GB: more than it has
                    kept.append(bytearray(b"x" * 50_000_000))
                threading.Event().wait()

            ranks(2).run(train)
        """)
    # A pod's kernel may end the rank alone.
    assert caught.value.kind in ("NodeLost", "WorkerDied"), caught.value
    assert "spark.executor.memoryOverhead" in caught.value.message


@pytest.mark.parametrize("kill", ["rank", "executor", "container", "pod", "eviction"])
def test_the_next_attempt_resumes(
    cluster: Manager, session: ManagedSession, start: Start, kill: str
) -> None:
    check_that_it_resumes(cluster, session, start, kill)
