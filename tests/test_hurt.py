"""Runs on a cluster whose processes are killed or stopped, and whose links are cut."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cluster import DEADLINE, Cluster, Driver, cluster_on, kill
from support.machines import machines_apart, why_not_apart
from support.waiting import alive, assert_gone, until

from distributor.wire.protocol import HEARTBEAT_SECONDS, LEASE_SECONDS

pytestmark = pytest.mark.spark

WHY_NOT = why_not_apart()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SLOWER = ("rank", "executor", "zygote", "driver_jvm")
NOTICED = LEASE_SECONDS + HEARTBEAT_SECONDS + 5.0
"""Seconds in which a node that cannot be heard is given up."""

TRAINING = """
def train(folder):
    import json, os, pathlib, subprocess, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    session = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # nobody waits for it
    note = pathlib.Path(folder, os.environ["RANK"])
    note.with_suffix(".part").write_text(json.dumps([os.getpid(), session.pid]))
    note.with_suffix(".part").rename(note.with_suffix(".json"))
    while not pathlib.Path(folder, "enough").exists():
        time.sleep(0.01)
    met = [None] * dist.get_world_size()
    dist.all_gather_object(met, folder)
    return met

def ordinary_job(folder):
    def wait(_):
        import pathlib, time
        pathlib.Path(folder, "begun").touch()
        while not pathlib.Path(folder, "enough").exists():
            time.sleep(0.01)
        return "done"
    tell(job=spark.sparkContext.parallelize([0], 1).map(wait).collect())

def at_the_word():
    for line in _told.makefile():
        threading.Thread(target=exec, args=[json.loads(line), globals()], daemon=True).start()

threading.Thread(target=at_the_word, daemon=True).start()
# PySpark's own handler cancels the jobs of others, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
spark.sparkContext.setJobGroup("of this test", "")
try:
    runner = TorchDistributor(2, local_mode=False, use_gpu=False{settings})
    tell(value=runner.run(train, {folder!r}))
except BaseException as error:
    tell(error=type(error).__name__, message=str(error), notes=getattr(error, "__notes__", []))
time.sleep(1000)
"""


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Give a cluster of two workers; they have one core each, or so many as the test asks for."""
    cores = getattr(request, "param", 1)
    with machines_apart(4) as machines, cluster_on(machines, tmp_path, cores=cores) as cluster:
        yield cluster


two_cores = pytest.mark.parametrize("cluster", [2], indirect=True, ids=["two cores"])


class Training:
    """Two ranks on two machines that train until it is enough.

    Attributes
    ----------
    started : list of Process
        Once the ranks have met: they, and what they have started in sessions of its own.
    """

    def __init__(self, cluster: Cluster, folder: Path, settings: str = "", **conf: Any) -> None:
        self._cluster = cluster
        self._folder = folder
        self._conf = conf
        folder.mkdir()
        self._source = TRAINING.format(folder=str(folder), settings=settings)
        self.started: list[psutil.Process] = []

    def start(self) -> Driver:
        self.driver = self._cluster.driver(self._source, **self._conf)
        return self.driver

    def await_ranks(self) -> list[psutil.Process]:
        """Give the ranks, by number, once both have met."""
        notes = [self._folder / f"{rank}.json" for rank in range(2)]
        until(lambda: all(note.exists() for note in notes), "the ranks have met", DEADLINE)
        found = [map(psutil.Process, json.loads(note.read_text())) for note in notes]
        ranks, sessions = zip(*found, strict=True)
        self.started = [*ranks, *sessions]
        return list(ranks)

    def await_ordinary_job(self) -> None:
        """Have the same session run a job that is none of ours, too."""
        self.driver.say(f"ordinary_job({str(self._folder)!r})")
        until((self._folder / "begun").exists, "the ordinary job has begun", DEADLINE)

    def let_end(self) -> None:
        (self._folder / "enough").touch()


@needs_namespaces
def test_a_node_that_is_cut_off_ends_the_run_and_does_not_train_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    training = Training(cluster, tmp_path / "ranks")
    with training.start() as driver:
        ranks = training.await_ranks()
        by_machine = {address_of(rank): rank for rank in ranks}
        machine = cluster.on_workers[0]
        machine.cut()
        cut_at = time.time()

        told = driver.hear("error", NOTICED + 10)

        assert told["error"] == "NodeLost"
        assert "no sign of life" in told["message"]
        assert told["at"] - cut_at < NOTICED
        assert_gone([by_machine[machine.address]], NOTICED)
        machine.mend()
        assert_gone(ranks)


@needs_namespaces
@pytest.mark.parametrize(
    "role",
    [
        "agent",
        "driver",
        *(pytest.param(role, marks=pytest.mark.slow) for role in SLOWER),
    ],
)
def test_a_killed_process_leaves_nothing_of_the_run(
    cluster: Cluster, tmp_path: Path, role: str
) -> None:
    training = Training(cluster, tmp_path / "ranks")
    with training.start() as driver:
        ranks = training.await_ranks()
        doomed = {
            "rank": lambda: ranks[1],
            "agent": lambda: agent_of(cluster, ranks[1]),
            "driver": lambda: psutil.Process(driver.process.pid),
        }.get(role, lambda: cluster.find(role)[0])()
        at = kill(doomed)
        if role == "zygote":
            assert alive(ranks) == ranks, "they need it no longer"
            return
        if role != "driver":
            told = driver.hear("error", 30)
            assert told["at"] - at < 15
            assert ("SIGKILL" in told["message"]) == (role == "rank")
        assert_gone(training.started)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(
    "word",
    [
        "spark.sparkContext.cancelAllJobs()",
        "spark.sparkContext.cancelJobGroup('of this test')",
        "spark.stop()",
    ],
)
def test_a_job_cancelled_by_spark_ends_the_run(cluster: Cluster, tmp_path: Path, word: str) -> None:
    training = Training(cluster, tmp_path / "ranks")
    with training.start() as driver:
        training.await_ranks()
        driver.say(word)
        assert driver.hear("error", 30)["error"] == "DistributorError"
        assert_gone(training.started)


@pytest.mark.slow
@needs_namespaces
def test_a_stopped_agent_ends_the_run(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "ranks")
    with training.start() as driver:
        ranks = training.await_ranks()
        agent = agent_of(cluster, ranks[1])
        agent.send_signal(signal.SIGSTOP)

        told = driver.hear("error", NOTICED + 10)

        assert told["error"] == "NodeLost"
        assert_gone(ranks[:1])


@pytest.mark.slow
@needs_namespaces
def test_a_deadline_tells_where_every_rank_stands(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "ranks", settings=", timeout=3")
    with training.start() as driver:
        training.await_ranks()

        told = driver.hear("error", 30)

        assert told["error"] == "RunTimeout"
        assert "ranks 0, 1:" in told["message"]
        assert "in train" in told["message"]


@pytest.mark.slow
@needs_namespaces
@two_cores
@pytest.mark.parametrize("how", ["killed", "cancelled"])
def test_of_two_drivers_one_ends_and_the_other_goes_on(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    half = {"spark.cores.max": "2"}
    doomed, other = (Training(cluster, tmp_path / name, **half) for name in ("doomed", "other"))
    with doomed.start() as doomed_driver, other.start() as others_driver:
        ranks, others = doomed.await_ranks(), other.await_ranks()
        both = [on_machine.address for on_machine in cluster.on_workers]
        assert sorted(map(address_of, ranks)) == sorted(map(address_of, others)) == sorted(both)

        if how == "killed":
            kill(psutil.Process(doomed_driver.process.pid))
        else:
            doomed_driver.say("spark.sparkContext.cancelAllJobs()")
            assert doomed_driver.hear("error", 30)["error"] == "DistributorError"

        assert_gone(doomed.started)
        assert alive(other.started) == other.started
        other.let_end()
        assert others_driver.hear("value", 30)["value"] == 2 * [str(tmp_path / "other")]


@pytest.mark.slow
@needs_namespaces
@two_cores
def test_ctrl_c_ends_the_run_and_no_other_job(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "ranks")
    with training.start() as driver:
        training.await_ranks()
        training.await_ordinary_job()
        at = time.time()
        driver.process.send_signal(signal.SIGINT)

        told = driver.hear("error", 30)

        assert told["error"] == "KeyboardInterrupt"
        assert told["at"] - at < 5
        driver.say("tell(active=len(spark.sparkContext.statusTracker().getActiveJobsIds()))")
        assert driver.hear("active", 30)["active"] == 1, "the ordinary job alone"
        assert_gone(training.started)
        training.let_end()
        assert driver.hear("job", 30)["job"] == ["done"]


LONG_TRAINING = """
def train(weights, seconds):
    import time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    end, steps, go_on = time.monotonic() + seconds, 0, torch.ones(1)
    while go_on:
        steps += 1
        print("step", steps)
        go_on = torch.tensor([float(time.monotonic() < end)])
        dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
    return weights * (dist.get_rank() + 1), steps

import torch
weights = torch.arange(2.0 * 2**20)
runner = TorchDistributor(2, local_mode=False, use_gpu=False)
(first, steps), (second, others_steps) = runner.run_all(train, weights, {seconds})
tell(whole=torch.equal(first, weights) and torch.equal(second, weights * 2),
     steps=[steps, others_steps])
"""


@pytest.mark.slow
@needs_namespaces
def test_a_slow_node_is_not_taken_for_a_lost_one(cluster: Cluster) -> None:
    cluster.on_workers[0].slow(200)
    with cluster.driver(LONG_TRAINING.format(seconds=NOTICED)) as driver:
        told = driver.hear("whole", DEADLINE)
        shown = driver.log.read_text().splitlines()

    assert told["whole"]
    steps, others_steps = told["steps"]
    assert 1 < steps == others_steps < NOTICED / 0.2, "each step waits for the slow node"
    for rank in range(2):
        lines = [line for line in shown if line.startswith(f"[{rank}] step ")]
        assert lines == [f"[{rank}] step {step + 1}" for step in range(steps)]


BEHIND_A_WALL = """
class Broken(Exception):
    pass

def train():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(2**20)
    dist.all_reduce(total)
    print("hello of", os.environ["SPARK_LOCAL_IP"])
    return total.sum().item(), os.environ["SPARK_LOCAL_IP"], os.environ["RANK"] * 2**20

def fail():
    if os.environ["SPARK_LOCAL_IP"] == {broken!r}:
        raise Broken("no", 3)
    threading.Event().wait()

runner = TorchDistributor(2, local_mode=False, use_gpu=False, hub_address={hub!r}, log_dir={logs!r})
tell(values=[[total, host, len(large)] for total, host, large in runner.run_all(train)])
try:
    runner.run(fail)
except Broken as error:
    tell(broken=error.args, remote=str(error.__cause__), hosts=[
        failure.origin.host for failure in error.rank_failures.values()])
"""


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("count", [1, 2])
def test_nodes_whose_words_to_the_driver_are_swallowed_do_their_work(
    cluster: Cluster, tmp_path: Path, count: int
) -> None:
    hub, logs = cluster.on_driver.also_elsewhere(), tmp_path / "logs"
    both = [machine.address for machine in cluster.on_workers]
    deaf = both[:count]
    for machine in cluster.on_workers[:count]:
        machine.lose(hub)
    source = BEHIND_A_WALL.format(broken=deaf[0], hub=hub.address, logs=str(logs))
    with cluster.driver(source) as driver:
        values = driver.hear("values")["values"]
        shown = driver.log.read_text()
        told = driver.hear("broken")

    assert sorted(values) == [[2.0 * 2**20, host, 2**20] for host in sorted(both)]
    assert told["broken"] == ["no", 3]
    assert 'raise Broken("no", 3)' in told["remote"]
    assert told["hosts"] == deaf[:1]
    assert shown.count("did not reach this process") == 1
    assert [f"hello of {host}" in shown for host in both] == [host not in deaf for host in both]
    printed = [file.read_text() for file in logs.glob("*/attempt_0/rank*.stdout")]
    assert sorted(filter(None, printed)) == [f"hello of {host}\n" for host in sorted(both)]


IGNORES_SIGTERM = """
def wait_in_vain(folder):
    open(os.path.join(folder, str(os.getpid())), "x").close()
    threading.Event().wait()

try:
    TorchDistributor(2, local_mode=False, use_gpu=False, hub_address={hub!r}, timeout=12).run(
        wait_in_vain, {folder!r})
except BaseException as error:
    tell(error=type(error).__name__, message=str(error),
         ranks=sorted(getattr(error, "stacks", {{}})))
"""


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("count", [1, 2])
def test_a_timeout_holds_where_the_drivers_port_is_blocked(
    cluster: Cluster, tmp_path: Path, count: int
) -> None:
    hub, ranks = cluster.on_driver.also_elsewhere(), tmp_path / "ranks"
    ranks.mkdir()
    for machine in cluster.on_workers[:count]:
        machine.lose(hub)
    with cluster.driver(IGNORES_SIGTERM.format(hub=hub.address, folder=str(ranks))) as driver:
        until(
            lambda: "Started distributed training" in driver.log.read_text(),
            "the driver says that the ranks have started",
            DEADLINE,
        )
        shown = driver.log.read_text()
        told = driver.hear("error", DEADLINE)

    assert shown.count("did not reach this process") == 1, "at the start, not at the end"
    assert told["error"] == "RunTimeout", told
    assert "in wait_in_vain" in told["message"]
    both = told["ranks"] == [0, 1]
    assert both if count == 1 else len(told["ranks"]) > 0
    assert_gone(int(rank.name) for rank in ranks.iterdir())


def agent_of(cluster: Cluster, rank: psutil.Process) -> psutil.Process:
    address = address_of(rank)
    [machine] = [machine for machine in cluster.on_workers if machine.address == address]
    return cluster.find("agent", machine)[0]


def address_of(process: psutil.Process) -> str:
    return str(process.environ()["SPARK_LOCAL_IP"])
