"""Trainings killed at any moment: what is committed stays, and what is not never counts."""

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
from support.machines import Machine, machines_apart, machines_on_loopback, why_not_apart
from support.training import BATCH, EPOCHS, SAMPLES, SAVE_EVERY, Fate, curve, samples, trainer
from support.waiting import assert_gone, until

from distributor.train import Result
from distributor.train.storage.checkpoint_store import Storage

cloudpickle.register_pickle_by_value(training)
WHY_NOT = why_not_apart()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
COUNT = 3
STEPS = EPOCHS * SAMPLES // (2 * BATCH)
RESUMED = {
    "before the first report": (Fate("step", 1, 1, ""), 0),
    "while training": (Fate("step", 6, 1, ""), 4),
    "in upload": (Fate("upload", COUNT, 1, ""), 4),
    "in rank 0's upload": (Fate("upload", 2 * COUNT - 1, 0, ""), 4),
    "while a checkpoint gets its record": (Fate("upload", 2 * COUNT, 0, ""), 4),
    "between upload and commit": (Fate("check", COUNT, 0, ""), 4),
    "in commit": (Fate("commit", COUNT, 0, ""), 4),
    "in pruning": (Fate("prune", 1, 0, ""), 6),
    "while recording": (Fate("record", COUNT, 0, ""), 6),
}
"""What happens when on which rank, and how many reports are there to go on from."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Give what comes of it when nobody hurts it."""
    return trainer(tmp_path_factory.mktemp("whole")).fit()


def check_kept(folder: Path, whole: Result) -> Result:
    """See that nothing is damaged or lost, and that the losses are those of a whole run."""
    storage = Storage(folder, "line")
    found = storage.committed()
    assert [name for name, _ in found], "something is committed"
    assert [storage.find_damage(name, manifest.files) for name, manifest in found] == [None] * 2
    result = Result.from_path(folder / "line")
    assert curve(result) == curve(whole), "to the last bit"
    assert len(curve(whole)) == STEPS
    for epoch in range(EPOCHS):
        assert sorted(samples(result, epoch)) == list(range(SAMPLES))
    return result


@pytest.mark.parametrize("moment", RESUMED)
def test_a_rank_is_killed(tmp_path: Path, whole: Result, moment: str) -> None:
    fate, left = RESUMED[moment]
    fate = replace(fate, marker=str(tmp_path / "marker"))

    result = trainer(tmp_path, failures=1, fate=fate).fit()

    assert Path(fate.marker).exists()
    assert result.return_value == whole.return_value
    assert [each.attempt for each in result.reports] == left * [0] + (STEPS - left) * [1]
    check_kept(tmp_path, whole)


DRIVER = """
import sys, cloudpickle
from support import training
cloudpickle.register_pickle_by_value(training)
fate = training.{fate!r}
training.trainer({folder!r}, fate=fate).fit()
"""


def waiting(fate: Fate, marker: Path) -> Fate:
    """Have the rank wait until somebody else ends it."""
    return replace(fate, marker=str(marker), killed=False)


def kill_driver(folder: Path, fate: Fate) -> float:
    """Kill a driver while a rank of its stands where fate struck; give when."""
    marker = folder / "marker"
    source = DRIVER.format(fate=waiting(fate, marker), folder=str(folder))
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, env={**psutil.Process().environ(), **environment}) as driver:
        until(lambda: marker.exists() and marker.read_text(), "fate strikes", 120)
        rank = int(marker.read_text())
        driver.kill()
    assert_gone([rank])
    return marker.stat().st_mtime


@pytest.mark.parametrize(
    "moment",
    [
        moment if moment == "in commit" else pytest.param(moment, marks=pytest.mark.slow)
        for moment in RESUMED
    ],
)
def test_the_driver_is_killed_and_another_goes_on(
    tmp_path: Path, whole: Result, moment: str
) -> None:
    fate, left = RESUMED[moment]
    killed_at = kill_driver(tmp_path, fate)

    result = trainer(tmp_path).fit()

    assert result.return_value == whole.return_value
    assert sum(each.at < killed_at for each in result.reports) == left
    check_kept(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_trainings_are_killed_somewhere(tmp_path: Path, whole: Result) -> None:
    """Each several times, at whatever operation in storage or batch comes then."""
    chance = random.Random(20)
    struck = 0
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        for life in range(chance.choice([1, 1, 2])):
            event = chance.choice(["any", "any", "upload", "commit", "prune", "step"])
            most = {"any": 60, "step": STEPS, "prune": 6}.get(event, STEPS)
            rank = chance.choice([0, 0, 1])
            marker = folder / f"marker{life}"
            fate = Fate(event, chance.randint(1, most), rank, str(marker))
            trainer(folder, failures=1, fate=fate, stop_at=chance.choice([None, 4])).fit()
            struck += marker.exists()
        trainer(folder).fit()
        check_kept(folder, whole)
    assert struck > SAVE_EVERY * 25, "most of them were hurt"


ON_CLUSTER = """
import sys
sys.path.insert(0, {tests!r})
import cloudpickle
from support import training
cloudpickle.register_pickle_by_value(training)
fate = training.{fate!r}
options = dict(workers={workers}, failures={failures}, local_mode=False, fate=fate)
try:
    send(value=training.trainer({folder!r}, **options).fit().return_value)
except Exception as error:
    send(value=repr(error), notes=getattr(error, "__notes__", []))
"""
ON_CLUSTER_TOO = ["while training", "in upload", "in commit", "in pruning"]


@contextlib.contextmanager
def struck_on_cluster(
    tmp_path: Path, machines: AbstractContextManager[list[Machine]], fate: Fate, workers: object
) -> Iterator[tuple[Cluster, Driver, Machine]]:
    """Have fate strike a rank of a cluster's; give also the driver, and the rank's machine."""
    folder = tmp_path / "runs"
    folder.mkdir()
    source = ON_CLUSTER.format(
        tests=str(Path(__file__).parents[1]),
        fate=waiting(fate, folder / "marker"),
        folder=str(folder),
        workers=workers,
        failures=1,
    )
    with (
        machines as made,
        cluster_on(made, tmp_path) as cluster,
        cluster.driver(source) as driver,
    ):
        yield cluster, driver, struck_on(cluster, folder)


def struck_on(cluster: Cluster, folder: Path) -> Machine:
    """Wait until fate strikes; give the machine of the rank that it struck."""
    marker = folder / "marker"
    until(lambda: marker.exists() and marker.read_text(), "fate strikes", 120)
    address = psutil.Process(int(marker.read_text())).environ()["SPARK_LOCAL_IP"]
    return next(machine for machine in cluster.on_workers if machine.address == address)


@pytest.mark.parametrize(
    "moment",
    [
        moment if moment == "in commit" else pytest.param(moment, marks=pytest.mark.slow)
        for moment in ON_CLUSTER_TOO
    ],
)
def test_an_executor_is_killed(tmp_path: Path, whole: Result, moment: str) -> None:
    """Spark starts another, in which the next attempt goes on."""
    fate, left = RESUMED[moment]
    with struck_on_cluster(tmp_path, machines_on_loopback(4), fate, 2) as struck:
        cluster, driver, machine = struck
        kill(cluster.find("executor", machine)[0])
        assert driver.receive("value")["value"] == whole.return_value

    result = check_kept(tmp_path / "runs", whole)
    assert [each.attempt for each in result.reports] == left * [0] + (STEPS - left) * [1]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ON_CLUSTER_TOO)
def test_a_host_is_killed(tmp_path: Path, moment: str) -> None:
    """The next attempt takes the one that is left."""
    fate, left = RESUMED[moment]
    with struck_on_cluster(tmp_path, machines_on_loopback(4), fate, (1, 2)) as struck:
        cluster, driver, machine = struck
        for process in cluster.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SPARK_LOCAL_IP") == machine.address:
                    process.kill()
        told = driver.receive("value")

    assert isinstance(told["value"], list), told
    result = Result.from_path(tmp_path / "runs" / "line")
    assert [each.world_size for each in result.reports[: left + 1]] == left * [2] + [1]
    for epoch in range(EPOCHS):
        assert sorted(samples(result, epoch)) == list(range(SAMPLES))


@pytest.mark.slow
@needs_namespaces
def test_a_host_is_cut_off(tmp_path: Path) -> None:
    """Spark itself learns of it only minutes later."""
    fate, left = RESUMED["while training"]
    with struck_on_cluster(tmp_path, machines_apart(4), fate, (1, 2)) as struck:
        _, driver, machine = struck
        machine.cut()
        told = driver.receive("value", 300)

    assert isinstance(told["value"], list), told
    result = Result.from_path(tmp_path / "runs" / "line")
    assert [each.world_size for each in result.reports[: left + 1]] == left * [2] + [1]
