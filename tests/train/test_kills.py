"""A training can be killed at any moment: committed checkpoints stay, others are never loaded."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import cloudpickle
import psutil
import pytest
from support import training
from support.cluster import Cluster, Driver, cluster_on, kill
from support.machines import Machine, machines_on_loopback
from support.reports import find_damage
from support.training import BATCH, EPOCHS, SAMPLES, Fault, curve, samples, trainer
from support.waiting import assert_gone, until

from distributor.train import Result
from distributor.train.storage.checkpoint_store import Storage

cloudpickle.register_pickle_by_value(training)
slow = pytest.mark.slow
COUNT = 3
STEPS = EPOCHS * SAMPLES // (2 * BATCH)
RESUMED = {
    "before the first report": (Fault("step", 1, 1, ""), 0),
    "while training": (Fault("step", 6, 1, ""), 4),
    "in upload": (Fault("upload", COUNT, 1, ""), 4),
    "in rank 0's upload": (Fault("upload", 2 * COUNT - 1, 0, ""), 4),
    "while the log of a checkpoint is written": (Fault("upload", 2 * COUNT, 0, ""), 4),
    "between upload and commit": (Fault("check", COUNT, 0, ""), 4),
    "in commit": (Fault("commit", COUNT, 0, ""), 4),
    "in pruning": (Fault("prune", 1, 0, ""), 6),
    "before the last pruning": (Fault("uncommit", 6, 0, ""), 16),
    "while the log of the run is written": (Fault("record", COUNT, 0, ""), 6),
}
"""For each moment: the fault, and the number of reports from which the training resumes."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Return the result of a training without a fault."""
    return trainer(tmp_path_factory.mktemp("undisturbed")).fit()


def check_checkpoints(folder: Path, undisturbed: Result) -> Result:
    """Check that no checkpoint is damaged or lost, and that the losses are as without a fault."""
    storage = Storage(folder, "line")
    found = storage.committed()
    assert [name for name, _ in found], "a checkpoint is committed"
    assert [find_damage(storage, *each) for each in found] == [None] * 2
    result = Result.from_path(folder / "line")
    assert curve(result) == curve(undisturbed), "to the last bit"
    assert len(curve(undisturbed)) == STEPS
    for epoch in range(EPOCHS):
        assert sorted(samples(result, epoch)) == list(range(SAMPLES))
    return result


MOMENTS = [pytest.param(moment, marks=() if moment == "in upload" else slow) for moment in RESUMED]


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_next_attempt_resumes_after_a_rank_is_killed(
    tmp_path: Path, undisturbed: Result, moment: str
) -> None:
    fault, left = RESUMED[moment]
    fault = replace(fault, marker=str(tmp_path / "marker"))

    result = trainer(tmp_path, failures=1, fault=fault).fit()

    assert Path(fault.marker).exists()
    assert result.return_value == undisturbed.return_value
    assert [each.attempt for each in result.reports] == left * [0] + (STEPS - left) * [1]
    check_checkpoints(tmp_path, undisturbed)


DRIVER = """
import sys, cloudpickle
from support import training
cloudpickle.register_pickle_by_value(training)
fault = training.{fault!r}
training.trainer({folder!r}, fault=fault).fit()
"""


def waiting(fault: Fault, marker: Path) -> Fault:
    """Return the same fault with a rank that waits to be killed instead of killing itself."""
    return replace(fault, marker=str(marker), killed=False)


def kill_driver(folder: Path, fault: Fault) -> float:
    """Kill a driver while one of its ranks waits at the fault, and return the time of the fault."""
    marker = folder / "marker"
    source = DRIVER.format(fault=waiting(fault, marker), folder=str(folder))
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, env={**psutil.Process().environ(), **environment}) as driver:
        until(lambda: marker.exists() and marker.read_text(), "the fault occurs", 120)
        rank = int(marker.read_text())
        driver.kill()
    assert_gone([rank])
    return marker.stat().st_mtime


@pytest.mark.parametrize("moment", ["in commit", pytest.param("in pruning", marks=slow)])
def test_a_new_driver_resumes_after_the_first_is_killed(
    tmp_path: Path, undisturbed: Result, moment: str
) -> None:
    fault, left = RESUMED[moment]
    killed_at = kill_driver(tmp_path, fault)

    result = trainer(tmp_path).fit()

    assert result.return_value == undisturbed.return_value
    assert sum(each.at < killed_at for each in result.reports) == left
    check_checkpoints(tmp_path, undisturbed)


@slow
def test_trainings_survive_kills_at_random_operations(tmp_path: Path, undisturbed: Result) -> None:
    """Each is killed once or twice, at a random batch or operation in storage."""
    rng = random.Random(20)
    kills = 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        for attempt in range(rng.choice([1, 1, 2])):
            event = rng.choice(["any", "any", "upload", "commit", "prune", "step"])
            max_count = {"any": 60, "step": STEPS, "prune": 6}.get(event, STEPS)
            rank = rng.choice([0, 0, 1])
            marker = folder / f"marker{attempt}"
            fault = Fault(event, rng.randint(1, max_count), rank, str(marker))
            trainer(folder, failures=1, fault=fault, stop_at=rng.choice([None, 4])).fit()
            kills += marker.exists()
        trainer(folder).fit()
        check_checkpoints(folder, undisturbed)
    assert kills >= 8, "few of the faults occurred"


ON_CLUSTER = """
import sys
sys.path.insert(0, {tests!r})
import cloudpickle
from support import training
cloudpickle.register_pickle_by_value(training)
fault = training.{fault!r}
options = dict(workers={workers}, failures={failures}, local_mode=False, fault=fault)
options["settings"] = {settings}
try:
    send(value=training.trainer({folder!r}, **options).fit().return_value)
except Exception as error:
    send(value=repr(error), notes=getattr(error, "__notes__", []))
"""
on_a_cluster = pytest.mark.parametrize(
    ("moment", "settings"), [("in commit", {}), ("while training", {"barrier": False})]
)


@contextlib.contextmanager
def fault_on_cluster(
    tmp_path: Path,
    machines: AbstractContextManager[list[Machine]],
    fault: Fault,
    workers: object,
    **settings: object,
) -> Iterator[tuple[Cluster, Driver, Machine]]:
    """Train on a cluster until the fault occurs, and yield the machine of its rank, too."""
    folder = tmp_path / "runs"
    folder.mkdir()
    source = ON_CLUSTER.format(
        tests=str(Path(__file__).parents[1]),
        fault=waiting(fault, folder / "marker"),
        folder=str(folder),
        workers=workers,
        failures=1,
        settings=settings,
    )
    with (
        machines as created,
        cluster_on(created, tmp_path) as cluster,
        cluster.driver(source) as driver,
    ):
        yield cluster, driver, machine_of_fault(cluster, folder)


def machine_of_fault(cluster: Cluster, folder: Path) -> Machine:
    """Wait until the fault occurs, and return the machine of its rank."""
    marker = folder / "marker"
    until(lambda: marker.exists() and marker.read_text(), "the fault occurs", 120)
    address = psutil.Process(int(marker.read_text())).environ()["SPARK_LOCAL_IP"]
    return next(machine for machine in cluster.on_workers if machine.address == address)


@slow
@on_a_cluster
def test_a_training_resumes_after_an_executor_is_killed(
    tmp_path: Path, undisturbed: Result, moment: str, settings: dict[str, bool]
) -> None:
    """Spark starts another executor, on which the next attempt resumes."""
    fault, left = RESUMED[moment]
    with fault_on_cluster(tmp_path, machines_on_loopback(4), fault, 2, **settings) as faulty:
        cluster, driver, machine = faulty
        kill(cluster.find("executor", machine)[0])
        assert driver.receive("value")["value"] == undisturbed.return_value

    result = check_checkpoints(tmp_path / "runs", undisturbed)
    assert [each.attempt for each in result.reports] == left * [0] + (STEPS - left) * [1]


@slow
def test_a_training_resumes_after_a_host_is_killed(tmp_path: Path) -> None:
    """The next attempt uses the remaining host."""
    fault, left = RESUMED["in commit"]
    with fault_on_cluster(tmp_path, machines_on_loopback(4), fault, (1, 2)) as faulty:
        cluster, driver, machine = faulty
        for process in cluster.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SPARK_LOCAL_IP") == machine.address:
                    process.kill()
        ending = driver.receive("value")

    assert isinstance(ending["value"], list), ending
    result = Result.from_path(tmp_path / "runs" / "line")
    assert [each.world_size for each in result.reports[: left + 1]] == left * [2] + [1]
    for epoch in range(EPOCHS):
        assert sorted(samples(result, epoch)) == list(range(SAMPLES))
