"""Further attempts of a run: how many, after which failures, and what is reported."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import cluster_is_slow
from support.ranks import Distribute
from support.waiting import until

from distributor import TorchDistributor, UnpicklableError, WorkerDied
from distributor import policies as retry_policy
from distributor.control.run import Attempt, Launcher, Run
from distributor.programs import program_of
from distributor.run_spec import RunSpec, Settings
from distributor.serialization.outcome import Origin, death

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def begin(folder: Path) -> int:
    """Record that a rank begins; return the number of its attempt."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"{attempt}-{os.environ['RANK']}").touch()
    return attempt


def begun(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def raise_below() -> None:
    raise ValueError("bad row 17")


def fail_twice(folder: Path) -> int:
    attempt = begin(folder)
    if os.environ["RANK"] == "1":
        if attempt == 0:
            raise_below()
        if attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return attempt


def test_a_run_is_attempted_until_it_succeeds(
    distribute: Distribute, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a limit. What failed meanwhile is shown, and known of the run."""
    future = distribute(2, max_failures=-1).submit(fail_twice, tmp_path)
    assert future.result() == 2

    assert begun(tmp_path) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    shown = capsys.readouterr().err
    assert re.search(r"rank 1 \(local rank \d\) on \S+, attempt 0:\nTraceback ", shown)
    assert "in raise_below" in shown
    assert "Failed: attempt 1 on 2 ranks: WorkerDied: rank 1 " in shown
    assert [attempt.number for attempt in future.attempts] == [0, 1]
    assert future.attempts[0].error.args == ("bad row 17",)


def print_and_die(folder: Path) -> None:
    print(f"attempt {begin(folder)}", flush=True)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


@cluster_is_slow
def test_failures_are_counted_exactly(distribute: Distribute, tmp_path: Path) -> None:
    """The error describes all attempts, and each has files of its own."""
    logs, folder = tmp_path / "logs", tmp_path / "begun"
    folder.mkdir()
    with pytest.raises(WorkerDied) as caught:
        distribute(2, max_failures=1, log_dir=logs).run(print_and_die, folder)

    assert begun(folder) == ["0-0", "0-1", "1-0", "1-1"]
    attempts = caught.value.attempts  # type: ignore[attr-defined]
    assert [(each.number, each.world_size) for each in attempts] == [(0, 2), (1, 2)]
    assert [next(iter(each.error.rank_failures)) for each in attempts] == [1, 1]
    (note,) = [note for note in caught.value.__notes__ if "attempt 1, the last" in note]
    assert "max_failures is 1" in note
    assert "attempt 0 on 2 ranks: WorkerDied: rank 1 (local rank " in note
    for number in range(2):
        [file] = logs.glob(f"*/attempt_{number}/rank1.stdout")
        assert file.read_text() == f"attempt {number}\n"


def return_a_lock(folder: Path) -> Any:
    begin(folder)
    return threading.Lock()


def test_a_failure_that_would_repeat_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UnpicklableError):
        TorchDistributor(1, use_gpu=False, max_failures=5).run(return_a_lock, tmp_path)
    assert begun(tmp_path) == ["0-0"]


@pytest.mark.parametrize(
    ("number", "limits", "is_followed"),
    [(5, (1, None), True), (0, (0, None), False), (0, (0, 1), True), (0, (9, 0), False)],
)
def test_an_attempt_that_limits_let_follow(
    number: int, limits: tuple[int, int | None], is_followed: bool
) -> None:
    """Resizes are attempts too, but no failures; preemptions have a limit of their own."""
    settings = Settings(max_failures=limits[0], max_preemption_failures=limits[1])
    spec = RunSpec(
        program=program_of(print, (), {}), num_processes=1, min_processes=1, settings=settings
    )
    killed = death(Origin(rank=0, local_rank=0, host="here"), -signal.SIGKILL)
    run, preempted = Run(spec=spec, launcher=Launcher()), {"here": [0]}
    attempt = Attempt(run=run, number=number, num_ranks=1, failures=[killed], preempted=preempted)
    assert attempt.may_be_followed == is_followed


def test_pauses_grow_while_attempts_fail_quickly() -> None:
    pauses = [retry_policy.pause_before_next(number, "run") for number in range(2000)]
    assert pauses[:2] == [0.0, 0.0], "a failure that does not repeat costs no pause"
    for number, pause in enumerate(pauses[2:]):
        longest = min(30.0, 0.25 * 2.0 ** min(number, 10))
        assert longest / 2 <= pause <= longest


def fail(folder: Path) -> None:
    begin(folder)
    raise KeyError("bug")


def test_a_run_can_be_cancelled_between_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retry_policy, "FIRST_PAUSE", 3000.0)
    monkeypatch.setattr(retry_policy, "LONGEST_PAUSE", 3000.0)
    future = TorchDistributor(1, use_gpu=False, max_failures=-1).submit(fail, tmp_path)
    shown: list[str] = []

    def pauses() -> bool:
        shown.append(capsys.readouterr().err)
        return "KeyError: 'bug'. Starting the next attempt in " in "".join(shown)

    until(pauses, "the second failure", 60)
    assert begun(tmp_path) == ["0-0", "1-0"]
    assert future.cancel(), "within 60 s, not after the pause"


@pytest.mark.spark
def test_a_range_means_as_many_ranks_as_there_are_slots(spark: Any) -> None:
    ranks = TorchDistributor((2, 99), local_mode=False, use_gpu=False, timeout=120)
    assert ranks.num_processes == (2, 99)
    assert ranks.run_all(lambda: os.environ["WORLD_SIZE"]) == ["4"] * 4
