"""Further attempts of a run: how many, after which failures, and what is reported."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.waiting import until

from distributor import TorchDistributor, UnpicklableError, WorkerDied, train
from distributor._compat.pyspark import jobs_with_tag
from distributor.control import attempts
from distributor.control.run import Attempt, Run
from distributor.launchers.local import LocalLauncher
from distributor.policies import retry_policy
from distributor.prepared_run import prepare_run
from distributor.programs.programs import program_of
from distributor.run.settings import Settings
from distributor.run.spec import RunSpec
from distributor.serialization.outcome import Origin, death

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Distribute = Callable[..., TorchDistributor]


def begin(folder: Path) -> int:
    """Record that a rank begins; return the number of its attempt."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"{attempt}-{os.environ['RANK']}").touch()
    return attempt


def begun(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def die(folder: Path, attempts: int) -> int:
    attempt = begin(folder)
    if attempt < attempts and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt


def test_a_run_is_attempted_until_it_succeeds(
    distribute: Distribute, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distribute(2, max_failures=2).run(die, tmp_path, 2) == 2

    assert begun(tmp_path) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    shown = capsys.readouterr().err
    assert "Failed: attempt 1 on 2 ranks: WorkerDied: rank 1 " in shown


def raise_below() -> None:
    raise ValueError("bad row 17")


def fail_once_below() -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise_below()
    return "ok"


def test_a_failed_attempt_that_is_followed_shows_its_cause(
    distribute: Distribute, capsys: pytest.CaptureFixture[str]
) -> None:
    future = distribute(2, max_failures=1).submit(fail_once_below)
    assert future.result() == "ok"

    shown = capsys.readouterr().err
    assert re.search(r"rank 1 \(local rank \d\) on \S+, attempt 0:\nTraceback ", shown)
    assert "in raise_below" in shown
    [attempt] = future.attempts
    assert attempt.number == 0
    assert attempt.error.args == ("bad row 17",)
    assert "in raise_below" in attempt.error.rank_failures[1].text  # type: ignore[attr-defined]


class FullAfterAFailure(LocalLauncher):
    """Finds no room for a second attempt."""

    def capacity(self, run: Run, silent: Collection[str]) -> int:
        if run.failed.count:
            raise RuntimeError("no room")
        return super().capacity(run, silent)


def test_an_error_between_attempts_has_the_earlier_ones(tmp_path: Path) -> None:
    ranks = TorchDistributor(1, use_gpu=False, max_failures=3, log_dir=tmp_path / "logs")
    prepared = prepare_run(ranks, False, fail, (tmp_path, lambda attempt: KeyError("a bug")), {})
    with pytest.raises(RuntimeError, match="no room") as caught:
        replace(prepared, launcher=FullAfterAFailure(None)).start()
    [attempt] = caught.value.attempts  # type: ignore[attr-defined]
    assert attempt.error.args == ("a bug",)
    notes = "\n".join(caught.value.__notes__)
    assert "Earlier attempts:\n  attempt 0 on 1 rank: KeyError: 'a bug'" in notes
    assert str(tmp_path / "logs") in notes


def attempt_of(number: int, **settings: Any) -> Attempt:
    """Return an attempt that a rank has ended, after a notice for its host."""
    spec = RunSpec(
        program=program_of(print, (), {}),
        num_processes=1,
        min_processes=1,
        settings=Settings(**settings),
    )
    origin = Origin(rank=0, local_rank=0, host="host0")
    return Attempt(
        run=Run(spec=spec),
        number=number,
        num_ranks=1,
        failures=[death(origin, signum=signal.SIGKILL)],
        preempted={"host0": [0]},
    )


def test_resizes_and_preemptions_have_limits_of_their_own() -> None:
    assert attempt_of(5, max_failures=1).may_be_followed, "after five resizes"
    assert not attempt_of(0, max_failures=0).may_be_followed
    assert attempt_of(0, max_failures=0, max_preemption_failures=1).may_be_followed
    assert not attempt_of(0, max_failures=9, max_preemption_failures=0).may_be_followed


def test_failures_are_counted_exactly(distribute: Distribute, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied) as caught:
        distribute(2, max_failures=1).run(die, tmp_path, 9)

    assert begun(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]
    attempts = caught.value.attempts  # type: ignore[attr-defined]
    assert [(each.number, each.world_size) for each in attempts] == [(0, 2), (1, 2)]
    assert [next(iter(each.error.rank_failures)) for each in attempts] == [1, 1]
    (note,) = [note for note in caught.value.__notes__ if "attempt 1, the last" in note]
    assert "max_failures is 1" in note
    assert "attempt 0 on 2 ranks: WorkerDied: rank 1 (local rank " in note


def print_and_fail_once() -> str:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"attempt {attempt}")
    if attempt == "0":
        raise KeyError("once")
    return os.environ["TORCHELASTIC_RUN_ID"]


def test_each_attempt_has_files_of_its_own(distribute: Distribute, tmp_path: Path) -> None:
    run_id = distribute(1, max_failures=1, log_dir=tmp_path).run(print_and_fail_once)
    files = {
        str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.stdout")
    }
    assert files == {
        f"{run_id}/attempt_{number}/rank0.stdout": f"attempt {number}\n" for number in range(2)
    }
    assert "once" in (tmp_path / run_id / "attempt_0" / "rank0.stderr").read_text()


def fail(folder: Path, error: Callable[[int], Exception]) -> None:
    attempt = begin(folder)
    if os.environ["RANK"] == "0":
        raise error(attempt)


def test_an_exception_that_repeats_is_counted_like_any_other(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    ranks = TorchDistributor(1, use_gpu=False, max_failures=4, timeout=120)
    with pytest.raises(KeyError, match="a bug") as caught:
        ranks.run(fail, tmp_path, lambda attempt: KeyError("a bug"))

    assert begun(tmp_path) == [f"{attempt}-0" for attempt in range(5)]
    assert any("max_failures is 4" in note for note in caught.value.__notes__)
    assert warned() == [
        f"Attempt {number} failed at the same step in the same way as {earlier}."
        for number, earlier in enumerate(
            ["1 earlier attempt", "2 earlier attempts", "3 earlier attempts"], start=1
        )
    ]


def fail_often(folder: Path) -> int:
    attempt = begin(folder)
    if attempt < 5:
        raise KeyError("a bug")
    return attempt


def test_minus_one_is_no_limit(distribute: Distribute, tmp_path: Path) -> None:
    assert distribute(1, max_failures=-1).run(fail_often, tmp_path) == 5


def fail_one_step_later(folder: Path) -> int:
    """Fail in each attempt with the same message, but each time one report later."""
    attempt = begin(folder)
    for _ in range(attempt + 1):
        train.report({"loss": 1.0})
    if attempt < 3:
        raise KeyError("a bug")
    return attempt


def test_an_exception_at_a_later_step_is_another(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    ranks = TorchDistributor(
        1, use_gpu=False, max_failures=-1, storage_path=tmp_path / "runs", timeout=120
    )
    folder = tmp_path / "begun"
    folder.mkdir()
    assert ranks.run(fail_one_step_later, folder) == 3
    assert warned() == []


def test_pauses_grow_while_attempts_fail_quickly() -> None:
    pauses = [retry_policy.pause_before_next(number, "run") for number in range(2000)]
    assert pauses[:2] == [0.0, 0.0], "a failure that does not repeat costs no pause"
    for number, pause in enumerate(pauses[2:]):
        longest = min(30.0, 0.25 * 2.0 ** min(number, 10))
        assert longest / 2 <= pause <= longest
    assert (
        retry_policy.pause_before_next(5, "run")
        == pauses[5]
        != retry_policy.pause_before_next(5, "other")
    )


def test_a_run_can_be_cancelled_between_attempts(
    distribute: Distribute,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(retry_policy, "FIRST_PAUSE", 3000.0)
    monkeypatch.setattr(retry_policy, "LONGEST_PAUSE", 3000.0)
    future = distribute(1, max_failures=-1).submit(fail, tmp_path, lambda attempt: KeyError("bug"))
    shown: list[str] = []

    def pauses() -> bool:
        shown.append(capsys.readouterr().err)
        return "KeyError: 'bug'. Starting the next attempt in " in "".join(shown)

    until(pauses, "the second failure", 60)
    assert begun(tmp_path) == ["0-0", "1-0"]
    assert future.cancel(), "within 60 s, not after the pause"


def save_and_fail(folder: Path) -> int:
    attempt = begin(folder)
    (folder / f"state-{attempt}").mkdir()
    train.report({}, checkpoint=train.Checkpoint.from_directory(folder / f"state-{attempt}"))
    if attempt < 3:
        raise KeyError("each time after a checkpoint")
    return attempt


@pytest.mark.parametrize("long_attempt", [60.0, 0.0])
def test_attempts_that_get_further_follow_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_attempt: float
) -> None:
    monkeypatch.setattr(retry_policy, "FIRST_PAUSE", 3000.0)
    monkeypatch.setattr(retry_policy, "LONGEST_PAUSE", 3000.0)
    monkeypatch.setattr(attempts, "LONG_ATTEMPT", long_attempt)
    storage = {"storage_path": tmp_path / "runs"} if long_attempt else {}
    ranks = TorchDistributor(1, use_gpu=False, max_failures=3, timeout=120, **storage)
    (tmp_path / "begun").mkdir()
    if long_attempt:
        assert ranks.run(save_and_fail, tmp_path / "begun") == 3
    else:
        with pytest.raises(KeyError):
            ranks.run(fail, tmp_path / "begun", lambda attempt: KeyError("a bug"))


def test_the_first_and_the_latest_failed_attempts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(retry_policy, "LATEST_KEPT", 2)
    monkeypatch.setattr(retry_policy, "KINDS_KEPT", 2)
    ranks = TorchDistributor(1, use_gpu=False, max_failures=5, timeout=120)
    with pytest.raises(KeyError) as caught:
        ranks.run(fail, tmp_path, lambda attempt: KeyError("ABBCDA"[attempt]))

    attempts = caught.value.attempts  # type: ignore[attr-defined]
    assert [(each.number, str(each.error)) for each in attempts] == [
        (0, "'A'"),
        (4, "'D'"),
        (5, "'A'"),
    ]
    (note,) = [note for note in caught.value.__notes__ if "attempt 5, the last" in note]
    listed = [line.split(" on ")[0].strip() for line in note.splitlines()[1:]]
    assert listed == ["attempt 0", "... 3 attempts left out ...", "attempt 4"]
    assert [line.split()[1] for line in warned()] == ["2"], "kinds that are long past are forgotten"


def return_a_lock(folder: Path) -> Any:
    import threading

    begin(folder)
    return threading.Lock()


def test_a_failure_that_would_repeat_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UnpicklableError):
        TorchDistributor(1, use_gpu=False, max_failures=5).run(return_a_lock, tmp_path)
    assert begun(tmp_path) == ["0-0"]


def test_a_range_of_ranks(tmp_path: Path) -> None:
    ranks = TorchDistributor((1, 2), use_gpu=False, timeout=120)
    assert ranks.num_processes == (1, 2)
    assert ranks.run_all(lambda: os.environ["WORLD_SIZE"]) == ["2", "2"]


@pytest.mark.spark
def test_as_many_ranks_as_there_are_slots(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = TorchDistributor((2, 99), local_mode=False, use_gpu=False, timeout=120)
    assert ranks.run_all(lambda: os.environ["WORLD_SIZE"]) == ["4"] * 4
    shown = capsys.readouterr().err
    assert "Started distributed training with 4 executor processes" in shown
    assert "Finished distributed training with 4 executor processes" in shown


def note_run_and_fail(folder: Path) -> None:
    (folder / "run").write_text(os.environ["TORCHELASTIC_RUN_ID"])
    raise KeyError("always")


@pytest.mark.spark
def test_the_spark_job_of_the_last_attempt_fails(spark: Any, tmp_path: Path) -> None:
    """The tasks of earlier ones succeed, because failing ones would cost their Python workers."""
    distributor = TorchDistributor(2, local_mode=False, use_gpu=False, max_failures=1)
    with pytest.raises(KeyError):
        distributor.run(note_run_and_fail, tmp_path)
    context = spark.sparkContext
    jobs = jobs_with_tag(context, (tmp_path / "run").read_text())
    states = [context.statusTracker().getJobInfo(job).status for job in sorted(jobs)]
    assert states == ["SUCCEEDED", "FAILED"]
