"""Trainings killed at any moment: what is committed stays, and what is not never counts."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import cloudpickle
import psutil
import pytest
from bed import training
from bed.training import EPOCHS, SAMPLES, SAVE_EVERY, Fate, curve, samples, trainer
from bed.waiting import assert_gone, until

from distributor.train import Result
from distributor.train.storage import Storage

cloudpickle.register_pickle_by_value(training)
COUNT = 3
STEPS = 12
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
    assert [storage.damage_of(name, manifest.files) for name, manifest in found] == [None] * 2
    result = Result.from_path(folder / "line")
    assert curve(result) == curve(whole), "to the last bit"
    assert len(curve(whole)) == STEPS
    for epoch in range(EPOCHS):
        assert sorted(samples(result, epoch)) == list(range(SAMPLES))
    return result


@pytest.mark.parametrize("moment", RESUMED)
def test_a_rank_is_killed(tmp_path: Path, whole: Result, moment: str) -> None:
    fate, left = RESUMED[moment]
    fate = Fate(fate.event, fate.count, fate.rank, str(tmp_path / "marker"))

    result = trainer(tmp_path, failures=1, fate=fate).fit()

    assert Path(fate.marker).exists()
    assert result.return_value == whole.return_value
    assert [each.attempt for each in result.reports] == left * [0] + (STEPS - left) * [1]
    check_kept(tmp_path, whole)


DRIVER = """
import sys, cloudpickle
from bed import training
cloudpickle.register_pickle_by_value(training)
fate = training.Fate({event!r}, {count}, {rank}, {marker!r}, killed=False)
training.trainer({folder!r}, fate=fate).fit()
"""


def kill_driver(folder: Path, fate: Fate) -> float:
    """Kill a driver while a rank of its stands where fate struck; give when."""
    marker = folder / "marker"
    source = DRIVER.format(
        event=fate.event, count=fate.count, rank=fate.rank, marker=str(marker), folder=str(folder)
    )
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
